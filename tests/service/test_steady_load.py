"""What the figures of a service under steady load say of its memory."""

from __future__ import annotations

from benchmarks.steady_load import Sample, halves


def test_ongoing_growth_is_distinguished_from_ended_growth() -> None:
    ended = [
        Sample(minute, 0, memory, 8, 20) for minute, memory in ((10, 150.0), (20, 154.0), (30, 154.5), (40, 154.5))
    ]
    goes_on = [Sample(minute, 0, 150.0 + minute / 5, 8, 20) for minute in (10, 20, 30, 40)]
    assert "+4.5 MiB from minute 10 to 30, +0.0 MiB from then to minute 40" in " ".join(halves(ended))
    assert "+4.0 MiB from minute 10 to 30, +2.0 MiB from then to minute 40" in " ".join(halves(goes_on))
