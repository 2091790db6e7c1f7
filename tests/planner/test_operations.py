"""What an operation returns on the meta device is found once, and made again as torch makes it."""

import pytest
import torch
from torch import Tensor

from hf_zero.planner import operations
from hf_zero.planner.meter import Meter
from hf_zero.planner.operations import MetaOperation
from tests.planner import subjects
from tests.planner.subjects import predict


pytestmark = pytest.mark.quick

_aten = torch.ops.aten


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _seen(result: Tensor | tuple) -> list[tuple]:
    made = result if isinstance(result, tuple) else (result,)
    return [(t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes()) for t in made]


@pytest.mark.parametrize(
    "func, args",
    [
        (_aten.mul.Tensor, (_empty(2, 3), _empty(3, dtype=torch.float64))),
        (_aten.add.Tensor, (_empty(4, dtype=torch.long), 1.5)),
        (_aten.mm.default, (_empty(3, 2).t(), _empty(3, 5))),
        (_aten.clone.default, (_empty(3, 2).t(),)),
        (_aten.cat.default, ([_empty(2, 3), _empty(4, 3)],)),
        (_aten.native_layer_norm.default, (_empty(2, 3), [3], _empty(3), _empty(3), 1e-5)),
        (_aten._scaled_dot_product_flash_attention_for_cpu.default, (_empty(1, 2, 8, 16),) * 3),
    ],
)
def test_a_result_is_found_once_and_made_again(func, args, monkeypatch):
    expected, operation = func(*args), MetaOperation(func)
    found = [operation.run(args, {}, measures=True) for _ in range(2)]
    monkeypatch.setattr(operation, "_func", None)
    found.append(operation.run(args, {}, measures=True))
    assert all(_seen(result) == _seen(expected) and amount == found[0][1] for result, amount in found)
    memory = {
        t.untyped_storage()._cdata for result, _ in found for t in (result if isinstance(result, tuple) else [result])
    }
    assert len(memory) == 3 * len(_seen(expected)), "each has memory of its own"


@pytest.mark.parametrize(
    "func, args",
    [
        (_aten.view.default, (_empty(2, 3), [6])),
        (_aten._unsafe_view.default, (_empty(2, 3), [6])),
        (_aten.add_.Tensor, (_empty(2), 1.0)),
        (_aten._lazy_clone.default, (_empty(2),)),
        (_aten.add.Tensor, (_empty(2), torch.ones(()))),  # a value of which the dtype may be weak
        (_aten.add.Tensor, (_empty(1).expand(9), 1.0)),  # how much is read follows from what is behind it
        (_aten.split.Tensor, (_empty(4), 2)),
    ],
)
def test_views_and_what_more_than_shapes_decides_are_asked_each_time(func, args):
    operation, calls = MetaOperation(func), []
    operation._func = lambda *given, **kwargs: calls.append(given) or func(*given, **kwargs)
    for _ in range(3):
        operation.run(args, {}, measures=True)
    assert len(calls) == 3


def test_equal_numbers_of_other_types_make_other_dtypes():
    operation, integers = MetaOperation(_aten.add.Tensor), _empty(2, dtype=torch.long)
    for number, dtype in ((1, torch.long), (1.0, torch.float32), (True, torch.long), (1, torch.long)):
        result, _ = operation.run((integers, number), {}, measures=False)
        assert result.dtype is dtype


@pytest.mark.parametrize(
    "func, args",
    [(_aten.div.Tensor, (_empty(2, dtype=torch.long), 2)), (_aten.mul.Tensor, (_empty(2, dtype=torch.long), 1.5))],
)
def test_the_default_dtype_decides_of_a_result(func, args):
    operation, before = MetaOperation(func), torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            torch.set_default_dtype(dtype)
            result, _ = operation.run(args, {}, measures=False)
            assert result.dtype is dtype
    finally:
        torch.set_default_dtype(before)


def test_how_much_is_read_of_what_is_expanded_follows_from_what_is_behind_it():
    operation, wide = MetaOperation(_aten.neg.default), _empty(100)[:1].expand(9)
    amounts = [operation.run((tensor,), {}, measures=True)[1] for tensor in (wide, _empty(1).expand(9), wide)]
    assert amounts == [(0, 36 + 36), (0, 4 + 36), (0, 36 + 36)]


@pytest.mark.parametrize(
    "settings", [{"stage": 3, "gradient_checkpointing": True}, {"stage": 2, "chunked_loss": "on"}]
)
def test_a_step_is_that_in_which_every_operation_is_asked(settings, monkeypatch):
    """Also what is held after each of its operations."""

    def held_in() -> tuple:
        seen = []

        def note(self, tensor: Tensor) -> None:
            noted(self, tensor)
            seen.append(dict(self.held))

        noted = Meter._note
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Meter, "_note", note)
            asked = {"num_ranks": 4, "batch": subjects.batch("llama"), "compute_dtype": torch.bfloat16}
            return predict(subjects.llama(), **asked, **settings), seen

    held_in()  # what is known now
    found = held_in()
    monkeypatch.setattr(operations, "_key_of", lambda *_: None)
    assert held_in() == found
