"""An event-driven 1F1B pipeline that knows nothing of the code under test: timelines whose answers are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mdsp.metrics.timeline import Instruction

Delay = Callable[[int, str, int], float]


def no_delay(stage: int, kind: str, micro_batch: int) -> float:
    return 0.0


def simulate_1f1b(
    forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int, send_delay: Delay = no_delay
) -> list[Instruction]:
    """Stage `s` does P - s - 1 forwards, then alternates one forward and one backward, then drains.

    A send lasts `send_delay(stage, "activation" | "grad", micro_batch)` and blocks its stage; what was sent is there
    when the send ends. A receive lasts from when the stage has nothing else to do until the data is there.
    """
    stages = len(forward_s)
    programs: list[list[tuple[str, int]]] = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, micro_batches)
        program = [("forward", m) for m in range(warm_up)]
        for m in range(micro_batches - warm_up):
            program += [("forward", warm_up + m), ("backward", m)]
        program += [("backward", m) for m in range(micro_batches - warm_up, micro_batches)]
        programs.append(program)

    arrived: dict[tuple[str, int, int], float] = {}
    now, position = [0.0] * stages, [0] * stages
    found: list[Instruction] = []

    def record(stage: int, kind: str, micro_batch: int, start: float, end: float) -> None:
        found.append(Instruction(stage, stage, kind, micro_batch, start, end))  # type: ignore[arg-type]

    while any(position[s] < len(programs[s]) for s in range(stages)):
        progressed = False
        for stage in range(stages):
            while position[stage] < len(programs[stage]):
                direction, m = programs[stage][position[stage]]
                is_forward = direction == "forward"
                source = stage - 1 if is_forward else stage + 1
                name = "activation" if is_forward else "grad"
                if 0 <= source < stages:
                    if (name, stage, m) not in arrived:
                        break
                    ready = max(now[stage], arrived[name, stage, m])
                    record(stage, f"recv_{name}", m, now[stage], ready)
                    now[stage] = ready
                end = now[stage] + (forward_s if is_forward else backward_s)[stage]
                record(stage, direction, m, now[stage], end)
                now[stage] = end
                target = stage + 1 if is_forward else stage - 1
                if 0 <= target < stages:
                    end += send_delay(stage, name, m)
                    record(stage, f"send_{name}", m, now[stage], end)
                    now[stage] = end
                    arrived[name, target, m] = end
                position[stage] += 1
                progressed = True
        assert progressed, "the simulated schedule cannot continue"
    return found
