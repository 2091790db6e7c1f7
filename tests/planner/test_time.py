"""The time of a step: what overlaps is not counted twice, and what is computed is what the model's shapes say."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from hf_zero.comm.blockwise import packed_nbytes
from hf_zero.config import ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.planner import Predictor, Throughput, compare
from hf_zero.planner.search import WAYS, ways
from hf_zero.planner.timeline import AVERAGE, COMPUTE, Begin, Ended, Wait, Work, played
from hf_zero.planner.topology import Cluster, device_named, known_devices
from tests.planner import subjects
from tests.planner.subjects import predict


H100 = Cluster(device_named("h100"), 2, 8)


class _Seconds:
    """A FLOP takes a second, and so does a byte."""

    def compute_seconds(self, flops: int, nbytes: int) -> float:
        return flops + nbytes

    def host_seconds(self, nbytes: int) -> float:
        return nbytes

    def exchange_seconds(self, nbytes: int, num_ranks: int, stride: int, *, by_messages: bool) -> float:
        return nbytes

    def copy_seconds(self, nbytes: int) -> float:
        return nbytes


@pytest.mark.quick
@pytest.mark.parametrize("gather, exposed, total", [(3, 0, 11), (8, 3, 14)])
def test_what_a_prefetch_hides_is_not_exposed(gather, exposed, total):
    # while 5 seconds are computed the next unit is gathered; its own 5 begin when it is there, 1 is the update
    events = [Begin(1, "gather", gather, 8, COMPUTE), Work(COMPUTE, 5), Wait(1, COMPUTE), Work(COMPUTE, 5), Ended()]
    found = played([*events, Work(COMPUTE, 0, 1)], _Seconds())
    assert found.exposed_ns["gather"] == exposed * 10**9 and found.busy_ns["gather"] == gather * 10**9
    assert found.step_seconds() == total and found.step_seconds(num_passes=3) == 3 * (total - 1) + 1


@pytest.mark.quick
def test_exchanges_go_one_after_another_and_a_step_ends_with_the_last():
    events = [Begin(1, "reduce", 4, 8, COMPUTE), Begin(2, "gather", 2, 8, COMPUTE), Work(COMPUTE, 1), Ended()]
    found = played(events, _Seconds())
    assert found.step_seconds() == 6 and found.pass_ns == 10**9
    assert (found.exposed_ns["reduce"], found.exposed_ns["gather"]) == (3 * 10**9, 2 * 10**9)


@pytest.mark.quick
def test_kernels_on_another_stream_take_their_time_from_the_device():
    """4 seconds are computed and 3 on the stream of reductions, between whose kernels 2 are sent."""
    events = [Begin(0, AVERAGE, 0, 1, COMPUTE), Wait(0, AVERAGE)]
    events += [Work(AVERAGE, 2), Begin(1, "reduce", 2, 8, AVERAGE), Wait(1, AVERAGE), Work(AVERAGE, 1)]
    events += [Begin(2, "reduce", 0, 1, AVERAGE), Work(COMPUTE, 4), Ended(), Wait(2, COMPUTE)]
    found = played(events, _Seconds())
    assert found.compute_ns == found.pass_ns == 7 * 10**9
    assert found.busy_ns["reduce"] == 2 * 10**9 and found.exposed_ns["reduce"] == 0


@pytest.mark.quick
def test_what_is_computed_follows_from_the_shapes():
    rows, length = subjects.ROWS, subjects.LENGTH
    model = subjects.llama()
    settings = {"num_ranks": 16, "batch": subjects.batch("llama"), "compute_dtype": torch.bfloat16, "cluster": H100}
    plain = predict(model, **settings).time
    # each weight but the embedding's, which is looked up, meets each token; scores and values of all pairs of tokens
    weights = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    attention = subjects.LAYERS * 4 * length * subjects.HIDDEN
    # older transformers multiply positions by frequencies, too
    assert plain.flops == plain.model_flops == pytest.approx(3 * rows * length * (2 * weights + attention), rel=1e-5)
    again = predict(model, gradient_checkpointing=True, **settings).time
    blocks = 3 * rows * length * (2 * (weights - subjects.VOCAB * subjects.HIDDEN) + attention)
    assert again.model_flops == plain.flops
    assert (
        0.7 * blocks / 3 < again.flops - plain.flops <= blocks / 3
    )  # a block ends early: its last product is left out


def test_the_last_backward_hides_reductions(monkeypatch):
    slow = replace(H100, device=replace(H100.device, network_gbits_per_s=20.0))
    settings = {"num_ranks": 16, "batch": subjects.batch("llama"), "cluster": slow, "stage": 1}
    told = predict(subjects.llama(), **settings).time
    monkeypatch.setattr(ZeroEngine, "reduced_early", lambda *_: [])
    untold = predict(subjects.llama(), **settings).time
    assert told.busy_ns == untold.busy_ns
    assert told.exposed_ns["reduce"] < untold.exposed_ns["reduce"]
    assert told.step_seconds() < untold.step_seconds()
    # those of the micro-batches before the last are as they were, but for kernels that begin a reduction
    assert told.pass_ns == pytest.approx(untold.pass_ns, rel=0.05)


def test_in_shard_groups_a_shard_alone_goes_between_hosts():
    settings = {"num_ranks": 16, "batch": subjects.batch("llama"), "compute_dtype": torch.bfloat16}
    slow = replace(H100, device=replace(H100.device, network_gbits_per_s=1.0, latency_us=0))
    whole = predict(subjects.llama(), cluster=slow, **settings).time
    grouped = predict(subjects.llama(), cluster=slow, shard_size=8, **settings).time
    assert whole.busy_ns["all_reduce"] == 0 < grouped.busy_ns["all_reduce"]
    near = slow.exchange_seconds(10**9, 8)
    assert near == pytest.approx(10**9 * 7 / 8 / (450e9 * 0.8))
    # 8 groups of two cross at a time, each through one card; one group of all through all 8
    assert slow.exchange_seconds(10**9, 2, 8) == pytest.approx(10**9 / 2 / (1e9 / 8 * 0.8))
    assert slow.exchange_seconds(10**9, 16) == pytest.approx(10**9 * 15 / 16 / (1e9 * 0.8))
    # with groups of 2 on hosts of 8, two share each card's time; groups of 3 are on two hosts here and there
    assert slow.exchange_seconds(10**9, 8, 2) == pytest.approx(10**9 * 7 / 8 / (4e9 / 8 * 0.8))
    assert slow.is_within_hosts(4, 2) and not slow.is_within_hosts(3)
    assert grouped.busy_ns["gather"] < whole.busy_ns["gather"] / 100
    # an 8th of the bytes crosses, through an 8th of the cards, but twice and not three times
    assert grouped.step_seconds() < whole.step_seconds()


def test_sums_in_few_bits_are_messages_and_kernels_around_them():
    settings = {"num_ranks": 16, "batch": subjects.batch("llama"), "compute_dtype": torch.bfloat16}
    slow = replace(H100, device=replace(H100.device, network_gbits_per_s=1.0, latency_us=0))
    # of 16 ranks each sends 8 parts to the other host, through its own card, and a ring sends the sums of a host
    assert slow.exchange_seconds(10**9, 16, by_messages=True) == pytest.approx(10**9 / 2 / (1e9 / 8 * 0.8))
    assert slow.exchange_seconds(10**9, 8, by_messages=True) == pytest.approx(slow.exchange_seconds(10**9, 8))
    # groups of 8 that are 2 apart have 4 ranks on each host
    assert slow.exchange_seconds(10**9, 8, 2, by_messages=True) == pytest.approx(10**9 / 2 / (1e9 / 8 * 0.8))
    exact, int8 = (
        predict(subjects.llama(), cluster=slow, reduce_dtype=dtype, **settings)
        for dtype in (torch.float32, torch.int8)
    )
    numel = sum(flat.nbytes // 4 * 16 for flat in int8.classes if flat.name == "reduced gradients")
    seconds = slow.exchange_seconds(packed_nbytes(numel), 16, by_messages=True)
    assert int8.time.busy_ns["reduce"] == pytest.approx(1e9 * seconds, rel=1e-3)
    # all that `pack_rows` (58 bytes) and `average_rows` (33) read and write of a value
    kernels = (int8.time.compute_ns - exact.time.compute_ns) * 0.8 * slow.device.memory_gbytes_per_s
    assert kernels == pytest.approx(88 * numel, rel=0.05)
    # within a host first, and then a shard of each group across
    grouped = predict(subjects.llama(), cluster=slow, reduce_dtype=torch.int8, shard_size=8, **settings)
    assert grouped.time.busy_ns["reduce"] < int8.time.busy_ns["reduce"] / 100 < grouped.time.busy_ns["all_reduce"]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_gradients_of_ranks_on_cpus_travel_as_they_are_collected(shared_memory):
    """They are added up in fp32 where they arrive. What is read in shared memory is not rounded on the way."""
    cluster = Cluster(replace(device_named("cpu"), latency_us=0, gpus_per_host=4), 1, 4)
    settings = {"num_ranks": 4, "batch": subjects.batch("llama"), "on_cpu": True, "shared_memory": shared_memory}
    exact, half, rounded = (
        predict(subjects.llama(), cluster=cluster, compute_dtype=compute, reduce_dtype=reduce, **settings)
        for compute, reduce in ((None, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.int8))
    )
    busy = [found.time.busy_ns["reduce"] for found in (exact, half, rounded)]
    assert busy[0] == pytest.approx(2 * busy[1], rel=1e-3)
    # 8 bits, and a scale for each 256 values, of 16
    assert busy[2] == pytest.approx(busy[1] * (1 if shared_memory else (8 + 32 / 256) / 16), rel=0.02)


@pytest.mark.quick
def test_a_way_that_is_not_possible_is_a_row_that_says_why():
    def predict_sizes(config, switch):
        if config.stage == 3:
            raise UnsupportedError("of stage 3\nnothing is known")
        return []

    refused = compare(predict_sizes, ZeroConfig(), 1).refused
    assert len(refused) == 2 * sum(stage == 3 for stage, _ in WAYS)
    assert refused[-1].row() == "  3      params     yes            skipped: of stage 3 nothing is known"
    with pytest.raises(UnsupportedError, match="of stage 3"):
        compare(lambda *_: predict_sizes(ZeroConfig(), False), ZeroConfig(), 1)


@pytest.mark.quick
def test_shard_groups_are_compared_where_they_change_something():
    found = [way for way, _ in ways(ZeroConfig(stage=3, shard_size=4), True, [None, 4, 4])]
    assert len(found) == len(WAYS) + sum(stage > 0 for stage, _ in WAYS) == len({*map(str, found)})
    assert all(way.shard_size is None for way in found if way.stage == 0)


def test_ranks_that_share_sequences_exchange_heads_and_share_the_work():
    settings = {"num_ranks": 16, "batch": subjects.batch("llama"), "compute_dtype": torch.bfloat16, "cluster": H100}
    whole, shared = (predict(subjects.llama(), sequence_parallel=parts, **settings) for parts in (1, 2))
    assert shared.time.flops == pytest.approx(whole.time.flops / 2, rel=1e-3)
    assert shared.step.activation_nbytes < 0.6 * whole.step.activation_nbytes
    assert shared.resting_nbytes == pytest.approx(whole.resting_nbytes, rel=1e-3)
    # of each block forth the heads of query, key and value, back those of the output, and in backward their gradients
    tokens, of_keys = subjects.ROWS * subjects.LENGTH // 2, subjects.HIDDEN // 2
    widths = (subjects.HIDDEN, of_keys, of_keys, subjects.HIDDEN)
    seconds = sum(H100.exchange_seconds(2 * tokens * width, 2) for width in widths)
    assert shared.time.busy_ns["heads"] == pytest.approx(2 * subjects.LAYERS * seconds * 1e9, rel=0.01)
    assert whole.time.busy_ns["heads"] == 0 < shared.time.exposed_ns["heads"]
    settings["cluster"] = replace(H100, num_hosts=16, gpus_per_host=1)
    far = predict(subjects.llama(), sequence_parallel=2, **settings)
    assert far.time.busy_ns["heads"] > shared.time.busy_ns["heads"]
    with pytest.raises(UnsupportedError, match="has 4 heads, which 8 ranks cannot divide equally"):
        predict(subjects.llama(), sequence_parallel=8, **settings)
    with pytest.raises(ConfigError, match="sequence_parallel: 16 ranks cannot form groups of 3"):
        predict(subjects.llama(), sequence_parallel=3, **settings)


def test_offload_goes_over_the_bus_and_works_on_the_host():
    settings = {"num_ranks": 8, "batch": subjects.batch("llama"), "compute_dtype": torch.bfloat16}
    cluster = replace(H100, num_hosts=1)
    on_device = predict(subjects.llama(), stage=2, cluster=cluster, **settings)
    offloaded = predict(subjects.llama(), stage=2, offload="optimizer", cluster=cluster, **settings)
    assert not any(on_device.time.busy_ns[kind] for kind in ("up", "down", "host"))
    assert all(offloaded.time.busy_ns[kind] > 0 for kind in ("up", "down", "host"))
    assert offloaded.time.step_seconds() > on_device.time.step_seconds()
    # the bytes that are counted are those of the copies; each is rounded to a nanosecond
    copied = offloaded.time.busy_ns["up"] + offloaded.time.busy_ns["down"]
    assert copied == pytest.approx(cluster.copy_seconds(offloaded.step.copied_nbytes) * 1e9, abs=100)


def test_a_gather_follows_the_copy_of_its_range_to_the_device():
    """At stage 3 with parameters on the host, a unit's range goes up, and is gathered from there."""
    settings = {"num_ranks": 8, "batch": subjects.batch("llama"), "compute_dtype": torch.bfloat16, "stage": 3}
    slow = replace(H100, num_hosts=1, device=replace(H100.device, peer_gbytes_per_s=0.01, host_gbytes_per_s=0.01))
    found = predict(subjects.llama(), offload="params", cluster=slow, **settings).time
    # all exchanges go one after another, and the first of the copies before all of them
    busy = found.busy_ns
    assert found.pass_ns > busy["gather"] + busy["reduce"] + busy["up"] / 5


def _batch_of(rows: int) -> dict[str, torch.Tensor]:
    return {key: value[:1].expand(rows, -1) for key, value in subjects.batch("llama").items()}


@pytest.mark.full("more cases", after=1)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sizes_of_micro_batches_follow_from_two(checkpointing):
    settings = {"num_ranks": 16, "cluster": H100}
    config = ZeroConfig(stage=3, compute_dtype=torch.bfloat16)
    predictor = Predictor(subjects.llama(), **settings)
    settings["gradient_checkpointing"] = checkpointing
    sizes = predictor.predict_rows(config, _batch_of, [1, 8], gradient_checkpointing=checkpointing)
    for rows, found in zip((1, 8), sizes):
        told = predict(subjects.llama(), batch=_batch_of(rows), compute_dtype=torch.bfloat16, **settings)
        assert found.time.flops == told.time.flops
        assert found.time.step_seconds() == pytest.approx(told.time.step_seconds(), rel=0.01)
        assert found.peak_nbytes == pytest.approx(told.peak_nbytes, rel=0.05)
        assert found.classes == told.classes


@pytest.mark.full("slow")
def test_all_ways_are_ranked_and_the_fastest_that_fits_is_recommended():
    config = ZeroConfig(stage=3, compute_dtype=torch.bfloat16)
    predictor = Predictor(subjects.llama(), num_ranks=16, cluster=H100)

    def predict_sizes(way, switch):
        found = predictor.predict_rows(way, _batch_of, [1, 4], gradient_checkpointing=switch)
        return [Throughput(each, H100, rows, rows * subjects.LENGTH) for rows, each in zip((1, 4), found)]

    table = compare(predict_sizes, config, 10**9, by_speed=True)
    assert len(table.rows) == 4 * len(WAYS)
    rates = [way.items_per_second for way in table.rows]
    assert rates == pytest.approx(sorted(rates, reverse=True), rel=1e-3)
    assert table.best is table.rows[0] and table.best.num_rows == 4
    assert "--per_device_train_batch_size 4 (" in table.verdict() and "the highest that fits" in table.verdict()
    least = min(way.needed_nbytes for way in table.rows)
    small = replace(table, memory_nbytes=int(least / 0.9) + 1)
    assert small.best.needed_nbytes == least and "faster settings need" in small.verdict()
    assert "nothing fits" in replace(table, memory_nbytes=1).render()


@pytest.mark.quick
def test_devices_have_sources_and_files_of_others_are_checked(tmp_path):
    for device in known_devices().values():
        assert len(device.sources) >= 2 and all(source.startswith("https://") for source in device.sources)
    own = tmp_path / "own.yaml"
    fields = {name: value for name, value in vars(device_named("a100")).items() if name not in ("name", "sources")}
    write = partial(_write, own, fields)
    write()
    assert device_named(str(own)) == replace(device_named("a100"), name="own", sources=())
    for change, message in (
        ({"bf16_tflops": -1}, "own: bf16_tflops is -1; expected a number above 0"),
        ({"gpus_per_host": 7.5}, "own: gpus_per_host is 7.5; expected a whole number above 0"),
        ({"utilization": 2}, "own: utilization is 2; expected at most 1"),
        ({"on_cpu": 1}, "own: on_cpu is 1; expected true or false"),
        ({"speed": 3}, "own: unknown speed; expected bf16_tflops, fp32_tflops"),
    ):
        write(**change)
        with pytest.raises(ConfigError, match=message):
            device_named(str(own))
    with pytest.raises(ConfigError, match="--gpu v100: expected h100, h200, a100, b200, cpu, or a YAML file"):
        device_named("v100")
    with pytest.raises(ConfigError, match="No such file"):
        device_named(str(tmp_path / "none.yaml"))


@pytest.mark.quick
def test_the_figures_of_a_processor_follow_from_its_cores():
    """Cores, clock, and two FMAs of 256 bits in a cycle; channels of memory, and lanes to the other socket."""
    cpu = device_named("cpu")
    fp32, gbytes = 96 * 2.4e9 * 2 * 2 * 8, 12 * 4.8 * 8
    assert cpu.peak_flops(torch.float32) == pytest.approx(fp32, rel=0.01)
    assert cpu.peak_flops(torch.bfloat16) == pytest.approx(2 * fp32, rel=0.01)
    assert cpu.memory_gbytes_per_s == cpu.host_memory_gbytes_per_s == pytest.approx(gbytes)
    assert cpu.host_gbytes_per_s == pytest.approx(gbytes / 2, rel=0.01) and cpu.peer_gbytes_per_s == 4 * 16 * 32 / 8
    assert cpu.on_cpu and cpu.gpus_per_host == 2
    assert not any(device.on_cpu for name, device in known_devices().items() if name != "cpu")


def _write(path, fields: dict, **changes) -> None:
    path.write_text("\n".join(f"{name}: {value}" for name, value in {**fields, **changes}.items()))
