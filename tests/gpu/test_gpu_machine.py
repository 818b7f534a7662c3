"""Tests of ``lab_utils.machine`` on a machine with a GPU, and of the facts that ``nvidia-smi`` adds."""

from __future__ import annotations

import pytest
import torch

from course import reference
from lab_common import nvidia
from lab_utils import machine

pytestmark = pytest.mark.gpu


def test_the_facts_of_a_gpu_are_torchs(gpu):
    here, properties = machine.describe(), torch.cuda.get_device_properties(0)
    assert len(here.gpus) == torch.cuda.device_count() >= 1
    assert (here.gpus[0].name, here.gpus[0].memory_bytes) == (properties.name, properties.total_memory)
    assert here.gpus[0].capability == tuple(torch.cuda.get_device_capability(0))
    assert here.gpus[0].name in here.label and here.cuda == torch.version.cuda


def test_the_labs_take_the_first_gpu_and_the_full_scale(gpu, monkeypatch):
    assert machine.device() == gpu.device
    assert (machine.scale(), machine.scale("cpu")) == ("full", "small")
    assert "there is a GPU" in machine.scale_reason()
    monkeypatch.setenv("LAB_SCALE", "small")
    assert (machine.scale(), machine.scale_reason()) == ("small", "LAB_SCALE says so")


def test_nvidia_smi_tells_driver_and_clocks(gpu, smi):
    rows = nvidia.query_smi("gpu=index,memory.total")
    assert rows[0][0] == "0" and int(rows[0][1]) > 0
    facts = reference.describe_machine()
    assert facts["driver"].partition(".")[0].isdigit()
    assert len(facts["clocks"]) == len(rows) and facts["clocks"][0]["clocks.max.sm"]
    assert facts["label"] == machine.describe().label and facts["gpus"]
