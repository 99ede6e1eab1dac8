"""NestPipe's published numbers: those that the model takes, those that are fitted, and those to reproduce.

Its tables II to IV and figures 2 and 8 to 10 give the weak scaling of HSTU with 512 samples a rank on 128 to
1,536 NPUs, and FuXi on 128 GPUs. Taken from there:

    seconds of computation     a step of TorchRec less its lookup and communication (table II)
    lookup, communication      of TorchRec on 1,536 ranks (table II), and their shares on 128 (figure 2)
    refresh                    the lookup that remains with each pipeline (table II), on any number of ranks
    2D-SP                      4 groups, and its lookup over TorchRec's on 1,536 ranks (table II)

Three values are fitted, the lookup of 256, 512 and 1,024 ranks, to the steps of TorchRec there, so those
aren't checks. One is inferred: 8 micro-batches, as NestPipe exposes 38.95 of 312.19 ms on GPUs. All else
follows: communication grows with the ranks along a line through two points, and with 2D-SP it is that of a
group. The paper doesn't divide the lookup among its stages; four equal ones are assumed, and any division in
which none takes longer than the window gives the same result. For fewer ranks the paper has only scaling
factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from parts.pipeline_model.events import simulate
from parts.pipeline_model.schedules import SYNCHRONOUS, TRAVELS, Schedule, Work

SAMPLES = 512  # samples of a rank's batch
MICRO = 8
GROUPS = 4
AHEAD = 2
_BATCHES, _WARM_UP = 14, 6

RANKS = (128, 256, 512, 1024, 1536)
STEP = {"TorchRec": 5793.83, "2D-SP": 4914.01, "UniEmb": 2919.76, "NestPipe": 1895.98}
"""Milliseconds on 1,536 ranks (table II)."""
SCALING = {
    "TorchRec": (1.0, 0.9123, 0.6664, 0.5336, 0.4434),
    "2D-SP": (1.0, 0.9136, 0.6964, 0.5667, 0.4932),
    "UniEmb": (1.0, 0.9613, 0.8921, 0.7800, 0.6762),
    "NestPipe": (1.0, 0.9839, 0.9733, 0.9563, 0.9407),
}
"""Samples a second over those of 128 ranks, as a share of ideal (table III)."""
LOOKUP, TRAVEL = 2870.99, 1207.85
LOOKUP_SHARE, TRAVEL_SHARE = 0.244, 0.092
REFRESH = {"UniEmb": 36.21, "NestPipe": 30.19, "NestPipe+2D-SP": 30.19}
LOOKUP_2D = 2766.68 / LOOKUP
UTILIZATION = {"TorchRec": (66.4, 29.6), "2D-SP": (70.5, 34.8)}
"""Percent of a step in which cores compute, on 128 and 1,536 ranks (section VII-D)."""
COMPUTE = STEP["TorchRec"] - LOOKUP - TRAVEL
SCHEDULES = {
    "TorchRec": SYNCHRONOUS,
    "2D-SP": SYNCHRONOUS,
    "UniEmb": Schedule(depth=AHEAD),
    "NestPipe": Schedule(depth=AHEAD, micro=MICRO),
    "NestPipe+2D-SP": Schedule(depth=AHEAD, micro=MICRO),
}


@dataclass(frozen=True)
class Check:
    """A published number beside the simulated one.

    Attributes:
      name: The number's name.
      simulated: The model's value.
      published: The paper's value.
      unit: The unit of both.
      how: ``checked``; ``fitted`` if the model was made to agree; ``given`` if the model uses the number
        itself.
    """

    name: str
    simulated: float
    published: float
    unit: str
    how: str = "checked"

    @property
    def off(self) -> float:
        """The relative difference of the simulated number from the published one."""
        return abs(self.simulated / self.published - 1)


def published_step(method: str, ranks: int) -> float:
    """Return the milliseconds of a step, from those on 1,536 ranks and the scaling factors."""
    return STEP[method] * SCALING[method][-1] / SCALING[method][RANKS.index(ranks)]


def travel(ranks: float) -> float:
    """Return the milliseconds of rows and gradients together: a line in the number of ranks."""
    first = TRAVEL_SHARE * published_step("TorchRec", RANKS[0])
    return first + (TRAVEL - first) * (ranks - RANKS[0]) / (RANKS[-1] - RANKS[0])


def lookup(ranks: float) -> float:
    """Return the milliseconds of a lookup: through the five points, and straight on beyond them."""
    inner = [published_step("TorchRec", n) - COMPUTE - travel(n) for n in RANKS[1:-1]]
    values = [LOOKUP_SHARE * published_step("TorchRec", RANKS[0]), *inner, LOOKUP]
    if ranks > RANKS[-1]:
        slope = (values[-1] - values[-2]) / (RANKS[-1] - RANKS[-2])
        return values[-1] + slope * (ranks - RANKS[-1])
    if ranks < RANKS[0]:
        return values[0] + (values[1] - values[0]) / (RANKS[1] - RANKS[0]) * (ranks - RANKS[0])
    return float(np.interp(ranks, RANKS, values))


def work_of(method: str, ranks: int) -> Work:
    """Return the milliseconds of the stages of a method."""
    in_groups = "2D-SP" in method
    each = lookup(ranks) * (LOOKUP_2D if in_groups else 1) / 4
    half = travel(ranks / GROUPS if in_groups else ranks) / 2
    return make_work(4 * each, 2 * half, COMPUTE, REFRESH.get(method, 0.0))


def make_work(lookup: float, travel: float, compute: float, refresh: float = 0.0) -> Work:
    """Divide a lookup among four stages, and communication into rows and gradients."""
    each, half = lookup / 4, travel / 2
    return Work(each, each, 0.0, each, each, refresh, half, compute, half)


def step_of(schedule: Schedule, work: Work) -> tuple[float, float]:
    """Return the time of a step, and the time in which rows or gradients travel while nothing computes."""
    found = simulate(schedule.program(work, _BATCHES))
    return found.step(_WARM_UP), found.exposed(TRAVELS, _WARM_UP)


def checks() -> Iterator[Check]:
    """Yield all published numbers for which the paper gives enough data."""
    found = {(m, n): step_of(SCHEDULES[m], work_of(m, n)) for m in SCHEDULES for n in RANKS}
    last = RANKS[-1]
    for method in STEP:
        for ranks in RANKS:
            own = method == "TorchRec" and ranks != RANKS[0]
            how = "checked" if not own else "given" if ranks == last else "fitted"
            step = found[method, ranks][0]
            yield Check(f"step/{method}/ranks{ranks}", step, published_step(method, ranks), "ms", how)
            if ranks != RANKS[0]:
                share, published = found[method, RANKS[0]][0] / step, SCALING[method][RANKS.index(ranks)]
                how = "fitted" if how == "fitted" else "checked"
                yield Check(f"scaling/{method}/ranks{ranks}", 100 * share, 100 * published, "% of ideal", how)
    for method, published in (
        ("2D-SP", 1.18),
        ("UniEmb", 1.98),
        ("NestPipe", 3.06),
        ("NestPipe+2D-SP", 3.18),
    ):
        times = found["TorchRec", last][0] / found[method, last][0]
        yield Check(f"speed_up/{method}/ranks{last}", times, published, "times TorchRec")
    for method, published in (
        ("TorchRec", 1.36),
        ("2D-SP", 1.60),
        ("NestPipe", 4.14),
        ("NestPipe+2D-SP", 4.32),
    ):
        rate = 1e3 * last * SAMPLES / found[method, last][0]
        yield Check(f"samples/{method}/ranks{last}", rate, 1e5 * published, "samples/s")
    for method, both in UTILIZATION.items():
        for ranks, percent in zip((RANKS[0], last), both, strict=True):
            yield Check(f"busy/{method}/ranks{ranks}", 100 * COMPUTE / found[method, ranks][0], percent, "%")
    joint = found["NestPipe+2D-SP", RANKS[0]][0] / found["NestPipe+2D-SP", last][0]
    yield Check(f"scaling/NestPipe+2D-SP/ranks{last}", 100 * joint, 97.17, "% of ideal")
    yield Check(f"travel/2D-SP/ranks{last}", travel(last / GROUPS), 438.36, "ms")
    for method, both, exposed in (
        ("NestPipe", 1185.60, 154.23),
        ("NestPipe+2D-SP", 452.34, 55.64),
    ):  # table IV
        work = make_work(LOOKUP, both, COMPUTE, REFRESH[method])
        yield Check(f"exposed/{method}/ranks{last}", step_of(SCHEDULES[method], work)[1], exposed, "ms")
    yield from _other_work()


def _other_work() -> Iterator[Check]:
    """Yield FuXi on GPUs (table II), other dense layers (figure 10), smaller micro-batches (figure 9)."""
    compute = 4207.94 - 856.63 - 312.19
    whole = make_work(856.63, 312.19, compute, 23.49)
    yield Check("step/UniEmb/gpus128", step_of(Schedule(AHEAD), whole)[0], 3384.05, "ms")
    pipeline = Schedule(AHEAD, MICRO)
    step, exposed = step_of(pipeline, make_work(856.63, 312.19, compute, 12.77))
    yield Check("step/NestPipe/gpus128", step, 3090.45, "ms")
    yield Check("exposed/NestPipe/gpus128", exposed, 38.95, "ms", "fitted")
    _, exposed = step_of(pipeline, make_work(0, 1169.8, 3393.12))
    yield Check("exposed/layers8", exposed, 146.23, "ms")
    for name, schedule in (("", pipeline), ("_in_turn", Schedule(AHEAD, MICRO, eager=False))):
        _, exposed = step_of(schedule, make_work(0, 1169.8, 892.78))
        yield Check(f"exposed{name}/layers2", exposed, 0.279 * 1169.8, "ms")
    _, exposed = step_of(Schedule(AHEAD, 32), make_work(0, 1331.33, COMPUTE))
    yield Check("exposed/micro16_unclustered", exposed, 0.252 * 1331.33, "ms")
