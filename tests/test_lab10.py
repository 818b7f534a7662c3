"""Lab 10 outside of its notebook: the GPT that it trains, and what it measures of memory."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from course.exercises.lab10.formulas import find_activation_bytes
from course.exercises.ranks import run_on_ranks
from lab_utils import memory
from lab_utils.timing import count_saved_bytes
from scripts import memory_limits

MB = 10**6


@pytest.fixture
def gpt(root, monkeypatch):
    """The script, as the notebook imports it."""
    monkeypatch.syspath_prepend(str(root / "notebooks"))
    from scripts import gpt

    return gpt


@pytest.fixture
def pieces(gpt):
    return gpt.draw_pieces(gpt.load_text(), 4, 32, seed=0)


def test_the_gpt_learns(gpt):
    torch.manual_seed(0)
    text, model = gpt.load_text(), gpt.GPT(width=64, layers=2)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(40):
        loss = gpt.find_loss(model, gpt.draw_pieces(text, 8, 32, seed=step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # At first all 256 bytes are alike: log 256 = 5.5.
    assert 5.3 < losses[0] < 5.8 and sum(losses[-5:]) / 5 < 3.8


def test_no_position_sees_what_comes_later(gpt, pieces):
    model, tokens = gpt.GPT(layers=2), pieces[:, :-1]
    other = tokens.clone()
    other[:, 20] = (other[:, 20] + 1) % 256
    with torch.inference_mode():
        before, after = model(tokens), model(other)
    assert torch.equal(before[:, :20], after[:, :20])
    assert (before[:, 20:] != after[:, 20:]).any(-1).all()


def test_recomputing_changes_no_gradient(gpt, pieces):
    models = [gpt.GPT(layers=2, recompute=recompute) for recompute in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        gpt.find_loss(model, pieces).backward()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
    kept = [count_saved_bytes(lambda net=model: gpt.find_loss(net, pieces), model) for model in models]
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize(("width", "layers", "batch", "tokens"), [(64, 1, 3, 128), (192, 5, 1, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula_of_activations_holds_for_other_shapes(gpt, width, layers, batch, tokens, dtype):
    model, some = gpt.GPT(width=width, layers=layers).to(dtype), gpt.draw_pieces(gpt.load_text(), batch, tokens, 1)
    kept = count_saved_bytes(lambda: gpt.find_loss(model, some), model)
    predicted = find_activation_bytes(batch * tokens, width, layers, dtype == torch.bfloat16)
    assert abs(kept / predicted - 1) < 0.02


def test_bytes_are_those_of_storages_each_once():
    base = torch.zeros(1000)
    assert memory.count_bytes([base, base[:10], None, base.view(10, 100)]) == 4000
    assert memory.count_bytes([base, torch.zeros(10, dtype=torch.float64)]) == 4080


def test_of_a_dtensor_the_local_part_counts_and_the_whole_is_joined():
    whole = torch.arange(12.0).view(6, 2)

    def work(rank):
        part = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        return memory.count_bytes([part]), memory.local(part), memory.join([part, "no tensor", torch.tensor([7.0])])

    for rank, (size, local, joined) in enumerate(run_on_ranks(work, work, case="a DTensor")):
        assert size == 24 and torch.equal(local, whole.chunk(2)[rank])
        assert joined.tolist() == [*range(12), 7]


def test_weights_in_one_tensor_are_still_the_nets():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    flat = memory.flatten(net)
    assert torch.equal(flat, memory.join(before))
    flat.zero_()
    assert not any(parameter.any() for parameter in net.parameters())


def test_a_curve_has_each_allocation_in_its_part(capfd):
    kept = []
    parts = {
        "forward": lambda: kept.append(torch.zeros(MB)),
        "backward": lambda: kept.append(torch.zeros(MB // 2)),
        "step": kept.clear,
    }
    curve = memory_limits.record_curve(parts, 3 * MB, list)
    forward, backward, step = ([mb for _, mb in curve[part]] for part in parts)
    assert max(forward) == pytest.approx(7, abs=0.01) and max(backward) == pytest.approx(9, abs=0.01)
    assert step[-1] == pytest.approx(3, abs=0.01)
    times = [ms for part in parts for ms, _ in curve[part]]
    assert times == sorted(times) and times[0] >= 0


FIND = """
import torch
from scripts import memory_limits

def train(layers):
    return [torch.empty(20 * 10**6, dtype=torch.uint8) for _ in range(layers)]

print(memory_limits.find_most_layers(train, 210 * 10**6))
"""


def test_the_largest_model_is_found_where_the_allocator_fails(root):
    """Each layer takes 20 MB; a card of 210 MB holds ten. In a new process: gaps in an old heap would come on top."""
    command, folder = [sys.executable, "-c", FIND], root / "notebooks"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.stdout == "10\n", done.stderr


def test_a_save_that_is_killed_has_no_metadata(tmp_path, survivors):
    files = memory_limits.save_and_kill(tmp_path / "killed")
    assert files and ".metadata" not in files
    assert not (tmp_path / "killed").exists()


def test_the_script_runs_by_itself(root):
    """As its first lines say; one step is enough."""
    code = "import gpt; gpt.range = lambda _: [0]; gpt.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root / "notebooks" / "scripts", capture_output=True, text=True, timeout=120
    )
    assert "step   0: loss 5." in done.stdout, done.stderr
