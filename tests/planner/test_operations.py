"""A result on the meta device that comes from the cache is what torch returns."""

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


def _seen(result: Tensor | tuple, args: tuple) -> list[tuple]:
    """The traits of each tensor, and whether it shares memory with an argument."""
    given = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
    return [
        (t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes(), _memory(t) in given)
        for t in (result if isinstance(result, tuple | list) else (result,))
    ]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize(
    "func, args",
    [
        (_aten.mul.Tensor, (_empty(2, 3), _empty(3, dtype=torch.float64))),
        (_aten.mm.default, (_empty(3, 2).t(), _empty(3, 5))),
        (_aten.clone.default, (_empty(3, 2).t(),)),
        (_aten._lazy_clone.default, (_empty(2),)),
        (_aten.cat.default, ([_empty(2, 3), _empty(4, 3)],)),
        (_aten.native_layer_norm.default, (_empty(2, 3), [3], _empty(3), _empty(3), 1e-5)),
        (_aten._scaled_dot_product_flash_attention_for_cpu.default, (_empty(1, 2, 8, 16),) * 3),
        # these share memory, or depend on more than shapes
        (_aten.view.default, (_empty(2, 3), [6])),
        (_aten._unsafe_view.default, (_empty(2, 3), [6])),
        (_aten.add_.Tensor, (_empty(2), 1.0)),
        (_aten.add.Tensor, (_empty(2), torch.ones(()))),  # a value of which the dtype may be weak
        (_aten.split.Tensor, (_empty(4), 2)),
    ],
)
def test_a_result_is_that_of_torch_each_time(func, args):
    operation = MetaOperation(func)
    found = [operation.run(args, {}, measures=True) for _ in range(3)]
    expected = _seen(func(*args), args)
    assert all(_seen(result, args) == expected and amount == found[0][1] for result, amount in found)
    if not any(shares for *_, shares in expected):
        first, second = ({_memory(t) for t in (r if isinstance(r, tuple) else [r])} for r, _ in found[1:])
        assert first.isdisjoint(second), "each has memory of its own"


def test_types_of_numbers_the_default_dtype_and_expanded_memory_count():
    integers, before = _empty(2, dtype=torch.long), torch.get_default_dtype()
    add, divide, negate = (MetaOperation(func) for func in (_aten.add.Tensor, _aten.div.Tensor, _aten.neg.default))
    for number, dtype in ((1, torch.long), (1.0, torch.float32), (True, torch.long), (1, torch.long)):
        assert add.run((integers, number), {}, measures=False)[0].dtype is dtype
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            torch.set_default_dtype(dtype)
            assert divide.run((integers, 2), {}, measures=False)[0].dtype is dtype
    finally:
        torch.set_default_dtype(before)
    wide = _empty(100)[:1].expand(9)
    amounts = [negate.run((tensor,), {}, measures=True)[1] for tensor in (wide, _empty(1).expand(9), wide)]
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
