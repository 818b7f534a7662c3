"""The timeline: what each row says, and what it costs when it is off."""

import time

from lab_utils.timing import Timeline


def test_each_phase_is_a_row_with_its_step_on_the_clock_of_the_day():
    timeline, before = Timeline(), time.time()
    for step in range(2):
        timeline.step = step
        timeline.begin()
        time.sleep(0.02)
        timeline.end("forward")
        time.sleep(0.01)
        timeline.end("backward")
    rows = timeline.as_rows()
    assert [(row["phase"], row["step"]) for row in rows] == [(p, s) for s in range(2) for p in ("forward", "backward")]
    moments = [moment for row in rows for moment in (row["start"], row["end"])]
    assert moments == sorted(moments)
    assert before - 0.01 <= moments[0] and moments[-1] <= time.time() + 0.01
    assert all(row["end"] - row["start"] >= (0.02 if row["phase"] == "forward" else 0.01) for row in rows)


def test_the_device_is_synchronised_at_the_end_of_each_phase_and_never_when_off(monkeypatch):
    calls = []
    monkeypatch.setattr("lab_utils.timing.timeline.synchronize", lambda device: calls.append(str(device)))
    for enabled in (True, False):
        timeline = Timeline("cuda:1", enabled=enabled)
        timeline.begin()
        assert calls == ["cuda:1"] * (not enabled)
        timeline.end("forward")
        assert len(timeline.as_rows()) == enabled
    assert calls == ["cuda:1"]
