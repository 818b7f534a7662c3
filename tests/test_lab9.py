"""Parts of lab 9: its claim that four versions equal DDP, on nets whose ranks have other gradients."""

from types import SimpleNamespace

import nbformat
import pytest
import torch

from course.ranks import fork_ranks
from lab_common import LabError
from scripts import nets

VERSIONS = ("after_backward", "in_hooks", "in_buckets", "overlap")


@pytest.fixture
def cells(root):
    return {cell.id: cell.source for cell in nbformat.read(root / "notebooks" / "09_send_less.ipynb", 4).cells}


@pytest.fixture
def compare(cells):
    """Runs the cells that compare the versions with DDP on two ranks, some replaced, and then the claims."""

    def run(**replaced):
        def work(rank):
            names = {"rank": rank, "inputs": draw_inputs(rank)}
            exec("import torch\nimport torch.distributed as dist\n", names)
            exec("from scripts import nets\nfrom lab_utils.calls import count_collectives\n", names)
            for cell in ("versions", "buckets", "fill"):
                exec(cells[cell], names)
            exec(cells["overlap"].partition("check.exercise")[0], names)
            exec(cells["compare"].removeprefix("%%px\n"), names := names | replaced)
            return names["apart"]

        outcomes = fork_ranks(work, None, 2, limit=60)
        assert [outcome.error for outcome in outcomes] == [None, None]
        view = {"apart": [outcome.value for outcome in outcomes]}
        exec("from course import check", names := {"ranks": SimpleNamespace(view=view)})
        exec(cells["claims"], names)

    return run


def draw_inputs(rank):
    """As the lab's cell does."""
    return torch.randn(512, 128, generator=torch.Generator().manual_seed(rank))


def send_nothing(net):
    return lambda: None


def test_versions_that_send_nothing_do_not_equal_ddp(compare):
    with pytest.raises(LabError, match="This does not hold here"):
        compare(**dict.fromkeys(VERSIONS, send_nothing))


def test_each_gradient_of_the_deep_net_is_a_ranks_own():
    """Far more than the claim allows: a version that leaves out one parameter is found, too."""
    own = []
    for rank in (0, 1):
        net, step = nets.make_step(send_nothing, draw_inputs(rank))
        step()
        own.append([parameter.grad for parameter in net.parameters()])
    apart = [(one - other).abs().max().item() / 2 for one, other in zip(*own, strict=True)]
    assert len(apart) == 64 and min(apart) > 1e-5
