"""In which order a step issues its work, and what the time line of the simulated accelerator makes of it."""

import pytest

from tests.simulated.timeline import Operation, Step, timed
from tests.tiers import more


def _collectives(step: Step) -> list[tuple[str, str]]:
    return [(each.what, each.unit) for each in step.operations if each.stream == "collectives"]


def _down(step: Step) -> list[Operation]:
    return [each for each in step.operations if each.stream.endswith("(down)") and each.what == "copy_"]


@pytest.mark.parametrize("way", ["stage 1", "stage 2", *more("stage 0", "stage 1, bf16")])
def test_a_stream_does_one_thing_after_another_and_what_waits_begins_later(way):
    step = timed(way)
    for stream in {each.stream for each in step.operations}:
        own = [each for each in step.operations if each.stream == stream]
        assert all(before.stop <= after.start for before, after in zip(own, own[1:])), stream
    assert step.seconds >= max(step.busy(computes=True), step.busy(computes=False))
    assert 0 < step.exposed < step.busy(computes=False), "some of what is sent travels while backward computes"
    names = [each.what for each in step.operations]
    assert names.index("reduce-scatter") < len(names) - names[::-1].index("mm"), "reductions begin in backward"


def test_what_comes_next_is_on_its_way_before_what_computes_now():
    step = timed("stage 3")
    first, blocks = ["root", "model.embed_tokens"], [f"model.layers.{index}" for index in range(4)]
    sent = _collectives(step)
    assert sent[:7] == [("all-gather", unit) for unit in [*first, *blocks, "lm_head"]]
    assert [unit for what, unit in sent if what == "reduce-scatter"] == ["lm_head", *blocks[::-1], *first[::-1]]
    names = [each.what for each in step.operations]
    gathers = [at for at, name in enumerate(names) if name == "all-gather"]
    assert gathers[2] < names.index("embedding")
    products = [at for at, each in enumerate(step.operations) if (each.what, each.unit) == ("mm", blocks[3])]
    assert gathers[6] < products[0], "the head is on its way while the last block computes"
    for block, following in ((2, 1), (1, 0)):  # when backward begins, the last two are still there
        begins, computes = (
            max(at for at, each in enumerate(step.operations) if (each.what, each.unit) == (what, blocks[unit]))
            for what, unit in (("all-gather", following), ("mm", block))
        )
        assert begins < computes, f"{blocks[following]} is gathered while {blocks[block]} computes"


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_average_goes_to_the_host_as_soon_as_it_is_queued(stage):
    step = timed(f"stage {stage}, optimizer on the host")
    sums = [each for each in step.operations if each.what == "reduce-scatter"]
    copies = _down(step)
    assert [each.unit for each in copies] == [each.unit for each in sums]
    for reduction, before, copy, later in zip(sums, [None, *copies], copies, [*sums[1:], None]):
        free = max(reduction.stop, before.stop if before is not None else 0.0)
        assert copy.start == pytest.approx(free, abs=1e-5), copy
        assert later is None or step.operations.index(copy) < step.operations.index(later), copy
