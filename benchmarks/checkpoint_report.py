"""Medians, ratios within one round, checks and Markdown tables of `benchmarks.checkpoint`."""

from __future__ import annotations

import argparse
from statistics import median

from benchmarks.checkpoint_names import SAVING_MODES, is_ours
from benchmarks.report import MIB, markdown, worst
from benchmarks.workload import SIZES


# The aims that the last table checks, as (title, key of a ratio, at most).
GOALS = (
    ("`from_pretrained` folder / best peer, as is", "pretrained", 0.5),
    ("`from_pretrained` folder / best peer, on disk", "pretrained_durable", 0.5),
    ("stall of the async save (second) / sync save", "stall", 0.15),
    ("load of weights / best peer", "weights", 0.6),
    ("load of the full state / best peer", "resumed", 0.6),
    ("extra tensor bytes of a save / best sharded peer", "extra_tensors", 1.0),
    ("extra private and shared bytes / best sharded peer", "extra_owned", 1.0),
)


def summarize(raw: dict[str, dict]) -> dict[str, dict]:
    """A summary per mode that has results, and under "goals" the ratios of hf_zero to the best of the others."""
    modes = {name: _summarize_mode(name, entry) for name, entry in raw.items() if not entry["error"]}
    return {"modes": modes, "ratios": _ratios(modes), "goals": _goals(modes)}


def _summarize_mode(name: str, entry: dict) -> dict:
    resumes = SAVING_MODES[name].loaders[0]
    rounds = [_round_times(measured) for measured in entry["rounds"]]
    times = {key: [values[key] for values in rounds] for key in rounds[0]}
    last = entry["rounds"][-1]["saves"]
    return {
        "seconds_per_round": times,
        "seconds": {key: None if None in values else median(values) for key, values in times.items()},
        "written_nbytes": sum(rank["second"]["written_nbytes"] for rank in last),
        "dirtied_nbytes": sum(rank["second"]["dirtied_nbytes"] for rank in last),
        "folder_nbytes": last[0]["first"]["folder_nbytes"],
        "pretrained_nbytes": last[0]["second"]["pretrained_nbytes"],
        "extra": _extra(entry["memory"], "save"),
        "extra_of_conversion": _extra(entry["memory"], "convert"),
        "loads": _loads(entry["rounds"], resumes),
        "checks": _checks(entry["rounds"][0], resumes),
    }


def _round_times(measured: dict) -> dict[str, float | None]:
    """Of one round; a moment is when the last rank has come to it."""

    def last(save: str, mark: str) -> float | None:
        found = [
            rank[save]["seconds"][mark]
            for rank in measured["saves"]
            if mark in rank.get(save, {"seconds": {}})["seconds"]
        ]
        return max(found, default=None)

    pretrained, complete = last("second", "pretrained"), last("second", "complete")
    lost = [rank["training"]["between"]["lost_seconds"] for rank in measured["saves"] if "training" in rank]
    return {
        "stall_first": last("first", "stall"),
        "stall": last("second", "stall"),
        "lost": max(lost, default=None),
        "complete_first": last("first", "complete"),
        "complete": complete,
        "durable": last("durable", "complete"),
        "pretrained": pretrained,
        "pretrained_durable": last("durable", "pretrained"),
        "conversion": pretrained - complete if pretrained and pretrained > complete else None,
    }


def _extra(ranks: list[dict], part: str) -> dict[str, float | None]:
    """Bytes above rest of the rank that takes most: at the peak, and still held after the second save."""
    spans = [rank[part]["tensors"] for rank in ranks]
    known = all(spans)
    return {
        "tensors": max(span["peak_nbytes"] - span["start_nbytes"] for span in spans) if known else None,
        "tensors_kept": max(span["end_nbytes"] - span["start_nbytes"] for span in spans) if known else None,
        "owned": max(rank[part]["owned_nbytes"] for rank in ranks),
        "resident": max(rank[part]["resident_nbytes"] for rank in ranks),
        "owned_kept": max(rank[part]["owned_kept_nbytes"] for rank in ranks),
    }


def _loads(rounds: list[dict], resumes: str) -> dict[str, dict]:
    """Per way to load and state of the page cache; only the first way restores the optimizer too."""
    loads = {}
    for loader, caches in rounds[0]["loads"].items():
        for cache in caches:
            per_round = [m["loads"][loader][cache] for m in rounds if cache in m["loads"].get(loader, {})]
            weights = [max(rank["seconds"].get("weights", 0.0) for rank in ranks) or None for ranks in per_round]
            resumed = [
                max(rank["seconds"]["resumed"] for rank in ranks) if loader == resumes else None for ranks in per_round
            ]
            resident = max(rank["memory"]["resident_nbytes"] for ranks in per_round for rank in ranks)
            loads[f"{loader}, {cache}"] = {
                "weights_per_round": weights,
                "resumed_per_round": resumed,
                "weights": None if None in weights else median(weights),
                "resumed": None if None in resumed else median(resumed),
                "resident_nbytes": resident,
            }
    return loads


def _checks(measured: dict, resumes: str) -> dict[str, float]:
    """Losses after a load against those of the run that saved: NaN and large values mean that it does not resume."""
    saves, checks = measured["saves"], {}
    for loader, caches in measured["loads"].items():
        ranks = next(iter(caches.values()))
        pairs = [(rank["losses"], saved["losses"]) for rank, saved in zip(ranks, saves, strict=True)]
        # A loader that restores weights alone is right in its first loss.
        upto = None if loader == resumes else 1
        checks[loader] = worst(
            abs(mine - theirs) for losses, saved in pairs for mine, theirs in zip(losses[:upto], saved[:upto])
        )
        if ranks[0]["pretrained_loss"] is not None:
            checks["plain from_pretrained"] = abs(ranks[0]["pretrained_loss"] - saves[0]["losses"][0])
    return checks


def _ratios(modes: dict[str, dict]) -> dict[str, dict]:
    """hf_zero over each peer: medians of the rounds' ratios; loads by the fastest way of each side."""
    ratios: dict[str, dict] = {}
    for name, theirs in modes.items():
        if "hf_zero" not in modes or name == "hf_zero":
            continue
        mine, ratios[name] = _all_times(modes["hf_zero"]), {}
        for key, values in _all_times(theirs).items():
            known = None not in (*values, *mine.get(key, [None]))
            ratios[name][key] = median(a / b for a, b in zip(mine[key], values)) if known else None
    return ratios


def _all_times(summary: dict) -> dict[str, list]:
    times = dict(summary["seconds_per_round"])
    for key in ("weights", "resumed"):
        ways = [load[f"{key}_per_round"] for load in summary["loads"].values() if load[key] is not None]
        if ways:
            times[key] = min(ways, key=median)
    return times


def _goals(modes: dict[str, dict]) -> dict[str, dict]:
    """hf_zero over the best of the peers, within each round; the async stall over hf_zero's own save."""
    goals = {}
    if "hf_zero" not in modes:
        return goals
    ours, peers = modes["hf_zero"], {name: summary for name, summary in modes.items() if not is_ours(name)}
    for key in ("pretrained", "pretrained_durable"):
        _add_goal(goals, key, ours["seconds_per_round"][key], _times(peers, key))
    if "hf_zero-async" in modes:
        mine = modes["hf_zero-async"]["seconds_per_round"]["stall"]
        sync = modes.get("hf_zero-whole", ours)
        _add_goal(goals, "stall", mine, {"sync": sync["seconds_per_round"]["complete"]})
    for key in ("weights", "resumed"):
        cache = next(iter(ours["loads"])).partition(", ")[2]
        theirs = {
            f"{name}: {loader}": load[f"{key}_per_round"]
            for name, summary in peers.items()
            for loader, load in summary["loads"].items()
            if loader.endswith(cache) and load[key] is not None
        }
        _add_goal(goals, key, ours["loads"][f"load, {cache}"][f"{key}_per_round"], theirs)
    for key in ("tensors", "owned"):
        # DDP copies nothing: it holds everything on every rank already.
        sharded = {name: summary["extra"][key] for name, summary in peers.items() if name != "ddp"}
        theirs = {name: [nbytes] for name, nbytes in sharded.items() if nbytes}
        if ours["extra"][key] is not None:
            _add_goal(goals, f"extra_{key}", [ours["extra"][key]], theirs)
    return goals


def _times(peers: dict[str, dict], key: str) -> dict[str, list[float]]:
    return {name: peer["seconds_per_round"][key] for name, peer in peers.items() if peer["seconds"][key] is not None}


def _add_goal(goals: dict, key: str, ours: list[float], theirs: dict[str, list[float]]) -> None:
    if not theirs:
        return
    ratios = [mine / min(values) for mine, *values in zip(ours, *theirs.values(), strict=True)]
    best = min(theirs, key=lambda name: median(theirs[name]))
    goals[key] = {"ratio": median(ratios), "min": min(ratios), "max": max(ratios), "best": best}


def print_report(dtype: str, raw: dict, summary: dict, options: argparse.Namespace) -> None:
    millions = SIZES[options.size].num_parameters / 1e6
    print(
        f"\n## {dtype}: {options.size} ({millions:.1f} M), {options.num_processes} ranks, AdamW state, "
        f"{options.rounds} rounds\n"
    )
    tables = (times_table, bytes_table, loads_table)
    print("\n\n".join(table(summary["modes"]) for table in tables))
    print(f"\n{ratios_table(summary['ratios'])}\n\n{goals_table(summary['goals'])}")
    for name, entry in raw.items():
        for error in (entry["error"], *entry["load_errors"].values()):
            if error:
                print(f"\n{name} failed: {error.strip().splitlines()[-1]}")


def times_table(modes: dict[str, dict]) -> str:
    """Seconds; of the second save, with its fastest and slowest round where it matters most."""
    keys = ("stall_first", "lost", "complete", "durable", "pretrained", "pretrained_durable", "conversion")
    header = ["save, s", "stall", "min-max", "first stall", "lost", "complete", "on disk"]
    header += ["from_pretrained", "min-max", "on disk", "of it conversion"]
    rows = []
    for name, summary in modes.items():
        cells = {key: _seconds(summary["seconds"][key]) for key in keys}
        stall, pretrained = (_spread(summary["seconds_per_round"][key]) for key in ("stall", "pretrained"))
        before, after = list(cells.values())[:5], list(cells.values())[5:]
        rows.append([name, _seconds(summary["seconds"]["stall"]), stall, *before, pretrained, *after])
    return markdown(header, rows)


def bytes_table(modes: dict[str, dict]) -> str:
    """MiB; memory of the rank that takes most above its state at rest, files of all ranks."""
    header = ["save, MiB", "tensors", "kept", "private + shared", "kept", "resident", "conversion"]
    header += ["written", "dirtied", "checkpoint", "model"]
    rows = []
    for name, summary in modes.items():
        extra, conversion = summary["extra"], summary["extra_of_conversion"]["owned"]
        keys = ("tensors", "tensors_kept", "owned", "owned_kept", "resident")
        sizes = ("written_nbytes", "dirtied_nbytes", "folder_nbytes", "pretrained_nbytes")
        converts = summary["seconds"]["conversion"] is not None
        memory = [*(_mib(extra[key]) for key in keys), _mib(conversion if converts else None)]
        rows.append([name, *memory, *(_mib(summary[key]) for key in sizes)])
    return markdown(header, rows)


def loads_table(modes: dict[str, dict]) -> str:
    """Seconds from fresh ranks; differences of losses after the load, which show whether it is right."""
    header = [
        "load, s",
        "weights",
        "min-max",
        "full state",
        "min-max",
        "resident MiB",
        "loss difference",
        "of the folder",
    ]
    rows = []
    for name, summary in modes.items():
        for way, load in summary["loads"].items():
            loader = way.partition(", ")[0]
            first = loader == SAVING_MODES[name].loaders[0]
            folder = summary["checks"].get("plain from_pretrained") if first else None
            rows.append([
                f"{name}: {way}",
                _seconds(load["weights"]),
                _spread(load["weights_per_round"]),
                _seconds(load["resumed"]),
                _spread(load["resumed_per_round"]),
                _mib(load["resident_nbytes"]),
                f"{summary['checks'][loader]:.1e}",
                "-" if folder is None else f"{folder:.1e}",
            ])  # fmt: skip
    return markdown(header, rows)


def ratios_table(ratios: dict[str, dict]) -> str:
    """hf_zero over every other mode; below 1 hf_zero is better."""
    keys = ("stall", "complete", "durable", "pretrained", "pretrained_durable", "weights", "resumed")
    header = ["hf_zero / mode", "stall", "complete", "on disk", "from_pretrained", "on disk", "load weights"]
    rows = [
        [name, *("-" if found.get(key) is None else f"{found[key]:.3f}" for key in keys)]
        for name, found in ratios.items()
    ]
    return markdown([*header, "load full state"], rows)


def goals_table(goals: dict[str, dict]) -> str:
    rows = []
    for title, key, most in GOALS:
        if key in goals:
            goal = goals[key]
            reached = "yes" if goal["ratio"] <= most else "no"
            spread = f"{goal['min']:.3f}-{goal['max']:.3f}"
            rows.append([title, f"{goal['ratio']:.3f}", spread, f"{most:g}", reached, goal["best"]])
    return markdown(["hf_zero", "ratio", "min-max", "aim", "reached", "against"], rows)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.{2 if value >= 1 else 3}f}"


def _spread(values: list[float | None]) -> str:
    return "-" if None in values else f"{_seconds(min(values))}-{_seconds(max(values))}"


def _mib(nbytes: float | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / MIB:.1f}" if nbytes < 100 * MIB else f"{nbytes / MIB:.0f}"
