"""Blocks that one rank leaves out while the others use them: nobody waits, and the average counts them as zero."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine import engine_of, partition
from tests.compare import weights_of
from tests.distributed import ranks
from tests.engine.models import WIDTH, Block, Tower, inputs, loss_of, one_backward, one_loss, through
from tests.engine.reference import (
    SETTINGS,
    assert_equal_weights,
    assert_like_plain_torch,
    assert_same_traffic,
    build_seeded,
    sharded,
    train_reference,
)
from tests.tiers import in_core, more


pytestmark = pytest.mark.direct


def run_with(order_of):
    """One step in which every rank calls the blocks that `order_of` gives it."""

    def act(model, rank, step):
        model.order = order_of(rank, step)
        return one_loss(model, rank, step)

    return act


ORDERS = {
    "middle": lambda rank, step: [0, 1, 3, 4] if rank == 0 else [0, 1, 2, 3, 4],
    "two in the middle": lambda rank, step: [0, 3, 4] if rank == 1 else [0, 1, 2, 3, 4],
    "first": lambda rank, step: [1, 2, 3, 4] if rank == 0 else [0, 1, 2, 3, 4],
    "last": lambda rank, step: [0, 1, 2, 3] if rank == 1 else [0, 1, 2, 3, 4],
    "all": lambda rank, step: [] if rank == 0 else [0, 1, 2, 3, 4],
    "all but one": lambda rank, step: [2] if rank == 0 else [0, 1, 2, 3, 4],
    "another on each": lambda rank, step: [i for i in range(5) if i % 2 != (rank + step) % 2],
    "nothing in common": lambda rank, step: [0, 1] if rank == 0 else [3, 4],
    "by turns": lambda rank, step: [0, 1, 2, 3, 4] if rank == step % 2 else [],
}


def five_blocks() -> Tower:
    return Tower(num_blocks=5)


CASES = [(name, 1) for name in ORDERS] + [("another on each", 0), ("another on each", 2)]


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("name, prefetch_units", in_core(CASES[:5] + CASES[-2:], CASES))
@ranks(2)
def test_blocks_skipped_on_one_rank(name, prefetch_units):
    assert_like_plain_torch(five_blocks, run_with(ORDERS[name]), num_steps=3, prefetch_units=prefetch_units)


@ranks(3)
def test_blocks_skipped_on_three_ranks():
    """Every rank leaves out another block, and the last rank all of them at one step."""

    def order_of(rank, step):
        return [] if (rank, step) == (2, 1) else [index for index in range(5) if index % 3 != rank]

    assert_like_plain_torch(five_blocks, run_with(order_of), num_steps=3)


@ranks(2)
def test_blocks_skipped_in_one_of_several_passes():
    """In the first or the second pass of a loss, and in an evaluation between a forward and its backward."""
    every = [0, 1, 2, 3, 4]

    def one_of_two(skipped, model, rank, step):
        losses = []
        for salt in range(2):
            model.order = [] if (rank, salt) == (0, skipped) else every
            losses.append(loss_of(model(inputs(rank, step, salt=salt))))
        return losses

    def evaluation(model, rank, step):
        model.order = every
        loss = one_loss(model, rank, step)
        model.order = [0, 3] if rank == 0 else [1, 4]
        with torch.no_grad():
            return [loss, loss_of(model(inputs(rank, step, salt=1)))]

    for act in (partial(one_of_two, 0), partial(one_of_two, 1), evaluation):
        assert_like_plain_torch(five_blocks, act)


@ranks(2)
def test_zero_grad_between_forward_and_backward_with_skipped_blocks():
    """Clearing old gradients between forward and backward is the habit of many training loops."""
    act = run_with(ORDERS["another on each"])
    _, wanted = train_reference(five_blocks, act)
    for stage in (1, 2, 3):
        model, engine, optimizer = sharded(five_blocks, stage)
        for step in range(2):
            loss = act(model, engine.comm.rank, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert_same_traffic(engine)
        assert_equal_weights(weights_of(model), wanted, f"stage {stage}")


class SkippingInside(nn.Module):
    """A block that is called but gives back its input: its output is the former block's tensor."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.inner = Block(width)
        self.is_off = False

    def forward(self, hidden):
        return hidden if self.is_off else self.inner(hidden)


@ranks(2)
def test_a_block_that_returns_its_input():
    for off_everywhere in (True, False):

        def act(model, rank, step, off_everywhere=off_everywhere):
            for index, layer in enumerate(model.layers):
                layer.is_off = index in (1, 2) and (off_everywhere or rank == 0)
            return one_loss(model, rank, step)

        assert_like_plain_torch(lambda: Tower(5, block=SkippingInside), act)


class Experts(nn.Module):
    """Each batch goes to one expert; some experts get none on any rank."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.experts = nn.ModuleList(Block(width) for _ in range(4))
        self.chosen = 0

    def forward(self, hidden):
        return hidden + self.experts[self.chosen](hidden)


class ExpertTower(Tower):
    """Its blocks are named, as a model of transformers names them, since the experts' lists are longer."""

    _no_split_modules = ["Experts"]

    def __init__(self):
        super().__init__(3, block=Experts)


@pytest.mark.quick
@ranks(2)
def test_experts_that_a_rank_does_not_use():
    for same_on_all_ranks in (True, False):

        def act(model, rank, step, same_on_all_ranks=same_on_all_ranks):
            for layer in model.layers:
                layer.chosen = 1 + (step if same_on_all_ranks else rank)
            return one_loss(model, rank, step)

        assert_like_plain_torch(ExpertTower, act)


class NestedStacks(nn.Module):
    """Stacks in a list: the parent of a stack's container has no forward of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.towers = nn.ModuleList(nn.ModuleList(Block() for _ in range(3)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)
        self.skipped = ()

    def forward(self, x):
        hidden = self.embed(x)
        for tower, blocks in enumerate(self.towers):
            for index, block in enumerate(blocks):
                if (tower, index) not in self.skipped:
                    hidden = block(hidden)
        return self.head(hidden)


# Blocks of each stack that the two ranks leave out.
LEFT_OUT = [
    (((0, 0), (0, 1), (0, 2)), ()),
    (((1, 0), (1, 1), (1, 2)), ()),
    (((0, 2), (1, 2)), ((1, 0),)),
]


@ranks(2)
def test_a_part_of_nested_stacks_skipped_on_one_rank():
    for left_out in LEFT_OUT:

        def act(model, rank, step, left_out=left_out):
            model.skipped = left_out[rank]
            return one_loss(model, rank, step)

        assert_like_plain_torch(NestedStacks, act)


class OwnForward(nn.Module):
    """Blocks that a forward of their own calls."""

    def __init__(self, num_blocks: int):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, hidden):
        return through(self.layers, hidden)


class Towers(nn.Module):
    """A model of several kinds of inputs, of which a batch need not have all. `called`: the towers of a forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.audio, self.vision, self.text = OwnForward(3), OwnForward(2), OwnForward(3)
        self.head = nn.Linear(WIDTH, 2)
        self.called = ("audio", "vision", "text")

    def forward(self, x):
        hidden = self.embed(x)
        for name in self.called:
            hidden = getattr(self, name)(hidden)
        return self.head(hidden)


def frozen_text() -> Towers:
    """Whether backward comes to the text's blocks depends on whether there is something else in the batch."""
    model = Towers()
    model.embed.requires_grad_(False)
    model.text.requires_grad_(False)
    return model


CALLED = {
    "one kind on one rank": lambda rank, step: ("vision", "text") if rank == step % 2 else ("text",),
    "another kind on each": lambda rank, step: ("audio", "text") if rank == 0 else ("vision", "text"),
    "the last": lambda rank, step: ("audio", "vision") if rank == 0 else ("vision", "text"),
    "none": lambda rank, step: () if rank == 0 else ("audio", "vision", "text"),
    "in another order": lambda rank, step: ("text", "vision") if rank == 0 else ("vision", "text"),
    "twice": lambda rank, step: ("vision", "vision", "text") if rank == 0 else ("text",),
}


@pytest.mark.quick(cases=1)
@pytest.mark.parametrize("build, num_ranks", [(Towers, 2), (frozen_text, 2), *more((Towers, 3))])
@pytest.mark.parametrize("name", CALLED)
@pytest.mark.full("more cases", after=6)
@ranks("num_ranks")
def test_towers_of_a_model_that_only_some_ranks_call(name, build, num_ranks):
    def act(model, rank, step):
        model.called = CALLED[name](rank, step)
        loss = one_loss(model, rank, step)
        with torch.no_grad():
            return [loss, loss_of(model(inputs(rank, step, salt=1)))]

    assert_like_plain_torch(build, act, num_steps=3, prefetch_units=num_ranks % 2)


@ranks(2)
def test_towers_that_ranks_call_in_another_of_two_passes():
    """The passes that ranks leave towers out of are not the same."""

    def act(model, rank, step):
        losses = []
        for salt in range(2):
            model.called = ("vision", "text") if rank == salt else ("text",)
            losses.append(loss_of(model(inputs(rank, step, salt=salt))))
        return losses

    assert_like_plain_torch(Towers, act)


class TwoLosses(nn.Module):
    """An encoder whose output a decoder takes, as often as it is called."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.encoder, self.decoder = OwnForward(3), OwnForward(3)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, encoded=None):
        encoded = self.encoder(self.embed(x)) if encoded is None else encoded
        return self.head(self.decoder(self.embed(x) + encoded))


@ranks(2)
def test_a_tower_whose_graph_two_backwards_use():
    """The encoder is not recorded by the second forward, and the second backward comes to it all the same."""

    def act(model, rank, step):
        encoded = model.encoder(model.embed(inputs(rank, step)))
        losses = [loss_of(model(inputs(rank, step, salt=salt), encoded)) for salt in range(2)]
        losses[0].backward(retain_graph=True)
        return losses[1]

    assert_like_plain_torch(TwoLosses, act, exact=False)


@ranks(2)
def test_a_backward_behind_a_step_that_was_left_out():
    """The graph of a forward outlasts a step that all ranks leave out."""
    plain, model = build_seeded(Towers), build_seeded(Towers)
    rank, optimizers = dist.get_rank(), [torch.optim.SGD(plain.parameters(), lr=0.1)]
    hf_zero.shard(model, stage=3, shared_memory=False, nonfinite="skip", **SETTINGS)
    optimizers.append(hf_zero.ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    kept = loss_of(model(inputs(rank, 0)))
    (loss_of(model(inputs(rank, 1))) * float("inf")).backward()
    optimizers[1].step()
    kept.backward()
    sum(loss_of(plain(inputs(each, 0))) for each in range(2)).div(2).backward()
    for optimizer in optimizers:
        optimizer.step()
    wanted = {name: p.detach() for name, p in plain.named_parameters()}
    assert_equal_weights(weights_of(model), wanted, "stage 3 against plain torch")


@ranks(2)
def test_gradients_are_collected_in_few_buffers_once_the_order_of_towers_is_known():
    """Towers are called in another order than they stand in; in the first step a rank leaves one out."""
    model, engine, optimizer = sharded(Towers, 3, shared_memory=False)
    (slots,) = {unit.gradient_slots for unit in engine.blocks}
    acquire, counts = slots.acquire, []
    slots.acquire = lambda: (acquire(), counts.append(len(slots.slots)))[0]
    for step in range(3):
        model.called = ("text",) if engine.comm.rank == step == 0 else ("text", "audio")
        counts.clear()
        one_backward(model, engine.comm.rank, step)
        assert step == 0 or max(counts) <= slots.count == 2, counts
        optimizer.step()


def _fail(*_) -> None:
    raise RuntimeError("a batch that cannot be")


@ranks(2)
def test_a_model_with_towers_that_ranks_do_not_call_equally_often():
    """One rank alone calls a model with two towers: it is told so, unless all is gathered."""
    model = Towers()
    engine = engine_of(hf_zero.shard(model, stage=3, shared_memory=False, **SETTINGS))
    rank = engine.comm.rank
    model.called = ("text",)
    with hf_zero.gathered(model), torch.no_grad():
        for _ in range(rank):
            model(inputs(rank, 0))
    model.called = ("audio", "vision", "text")
    loss_of(model(inputs(rank, 0))).backward()
    with pytest.raises(hf_zero.errors.CommError, match="call the model equally often on all ranks"):
        if rank == 1:
            model.audio.register_forward_pre_hook(_fail)
            with pytest.raises(RuntimeError, match="cannot be"):
                model(inputs(rank, 0))
            model.audio._forward_pre_hooks.popitem()
        model(inputs(rank, 0))


def frozen(*blocks: int, embed: bool = False) -> Tower:
    """Whether backward comes to blocks in the middle depends on what was called before."""
    model = five_blocks()
    model.embed.requires_grad_(not embed)
    for block in blocks:
        model.layers[block].requires_grad_(False)
    return model


@pytest.mark.parametrize("build", [partial(frozen, 1, 2), partial(frozen, 0, 1, 2, embed=True)])
@pytest.mark.parametrize("name", ["middle", "first", "last", "all but one", "another on each"])
@pytest.mark.full("more cases", after=2)
@ranks(2)
def test_frozen_blocks_skipped_on_one_rank(build, name):
    assert_like_plain_torch(build, run_with(ORDERS[name]))


@pytest.mark.parametrize("settings", [{}, *more({"shared_memory": False})])
@ranks(2)
def test_a_collective_of_the_user_follows_a_skipped_block(settings):
    """A rank leaves out a block and goes on to a collective of its own, in which it helps nobody."""

    def wait_for_everyone() -> None:
        dist.all_reduce(torch.ones(1))

    model = five_blocks()
    for module in (model.embed, *model.layers[:2], model.head):  # so no reduction follows a backward's last gather
        module.requires_grad_(False)
    engine = engine_of(hf_zero.shard(model, stage=3, **SETTINGS | settings))
    rank = engine.comm.rank
    for name in ("last", "first"):
        model.order = ORDERS[name](rank, 0)
        with torch.no_grad():
            model(inputs(rank, 0))
        wait_for_everyone()
        loss = loss_of(model(inputs(rank, 0).requires_grad_()))
        wait_for_everyone()
        loss.backward()
        wait_for_everyone()


class BlocksOfTowers(Towers):
    """Towers whose blocks are called by the model itself, in an order that each rank chooses."""

    def forward(self, x):
        hidden = self.embed(x)
        for tower, block in self.called:
            hidden = getattr(self, tower).layers[block](hidden)
        return self.head(hidden)


# A tower between the blocks of another; the last block of a tower on one rank, all of it on another.
UNLIKE = [
    ([("vision", 0), ("text", 0), ("vision", 1), ("text", 1), ("text", 2)], [("text", 0), ("text", 1), ("text", 2)]),
    ([("vision", 0), ("text", 0), ("text", 1), ("text", 2)], [("text", 0), ("text", 1), ("text", 2)]),
]


@ranks(2)
def test_blocks_of_towers_that_ranks_call_in_unlike_orders():
    for called in UNLIKE:
        model = BlocksOfTowers()
        hf_zero.shard(model, stage=3, shared_memory=False, **SETTINGS)
        model.called = called[dist.get_rank()]
        with pytest.raises(hf_zero.errors.CommError, match="has called blocks of several towers in another order"):
            model(inputs(dist.get_rank(), 0))


def _with_images() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    tower = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**tower, image_size=4, patch_size=2, projection_dim=8),
        text_config=LlamaConfig(**tower, num_key_value_heads=2, vocab_size=32, tie_word_embeddings=False),
        image_token_index=31,
        vision_feature_layer=-1,
        attn_implementation="sdpa",
    )
    return LlavaForConditionalGeneration(config)


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("frozen", [None, "language_model", "vision_tower"])
@ranks(2)
def test_a_rank_without_images(frozen):
    """A rank has images at every other step. The embedding is a unit that is called before the images' tower."""

    def build() -> nn.Module:
        model = _with_images()
        if frozen is not None:
            getattr(model.model, frozen).requires_grad_(False)
        return model

    def act(model, rank, step):
        generator = torch.Generator().manual_seed(10 * step + rank)
        batch = {"input_ids": torch.randint(0, 30, (1, 9), generator=generator)}
        batch["labels"] = batch["input_ids"].clone()
        if rank == step % 2:
            batch["input_ids"][:, 1:5] = 31
            batch["pixel_values"] = torch.randn(1, 3, 4, 4, generator=generator)
        return model(**batch).loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "VOCABULARY_NUMEL", 0)
        assert_like_plain_torch(build, act, num_steps=3)
