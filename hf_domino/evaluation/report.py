"""Tables and plots of benchmark results, of one machine or of several."""

import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .methods import METHODS
from .summary import whole_rounds
from .timing import DRAFTING_PARTS

logger = logging.getLogger(__name__)

LABELS = {
    "plain": "plain",
    "domino": "Domino",
    "domino-adaptive": "Domino, adaptive block",
    "domino-base": "Domino, base alone",
    "published-loop": "Domino, published loop",
    "dflash": "DFlash",
    "stock-dflash": "DFlash, transformers",
    "eagle3": "EAGLE-3",
    "assistant": "small model",
    "prompt-lookup": "prompt lookup",
}
# Okabe and Ito's palette, a grey and a wine red, which colour-blind readers tell apart too; markers for print without
# colour.
COLOURS = dict(zip(METHODS, "#f0e442 #0072b2 #7f7f7f #56b4e9 #d55e00 #009e73 #000000 #882255 #e69f00 #cc79a7".split()))
MARKERS = dict(zip(METHODS, "x o * s D ^ v p P X".split()))
YARDSTICKS = ("published-loop", "stock-dflash")
PARTS = [*DRAFTING_PARTS, "drafting and rest", "verify", "rest"]
PART_COLOURS = dict(zip(PARTS, "#009e73 #0072b2 #e69f00 #d55e00 #f0e442 #56b4e9 #bbbbbb".split()))
TABLE_FILE = "report.md"


@dataclass
class ReportOptions:
    """Make the table and the plots of benchmark results again; several machines' become one table."""

    results: list[str] = field(metadata={"help": "The result.json of one or more runs."})
    out: str = field(metadata={"help": "The folder to write to."})


def run_report(options: ReportOptions) -> None:
    results = []
    for name in options.results:
        result = json.loads(Path(name).read_text(encoding="utf-8"))
        if not isinstance(result, dict) or not {"machine", "records", "summary"} <= result.keys():
            raise ValueError(f"{name} is no result of hf-domino bench.")
        results.append(result)
    print(write_report(results, options.out))


def write_report(results: list[dict], out) -> str:
    """Write `report.md` and the plots; returns the text of the table.

    Raises:
        ImportError: matplotlib is missing; the table is written all the same.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    machines = merge(results)
    text = table(machines)
    (out / TABLE_FILE).write_text(f"{text}\n", encoding="utf-8")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{out / TABLE_FILE} is there; the plots need matplotlib: pip install matplotlib") from error
    figures = {name: draw(machines, Figure) for name, draw in PLOTS.items()}
    figures = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=200)
    links = "\n\n".join(f"![{name.replace('_', ' ')}]({name}.png)" for name in figures)
    (out / TABLE_FILE).write_text(f"{text}\n\n{links}\n", encoding="utf-8")
    return text


# ---- several results


def machine_name(result: dict) -> str:
    own = result["machine"]
    threads = f"{own['threads']} thread{'s' if own['threads'] > 1 else ''}"
    return own["device"] if own["device"] != "cpu" else f"{own['cpu']}, {threads}"


def merge(results: list[dict]) -> dict[str, list[dict]]:
    """Results by what they belong to: the machine and, where they differ, target and dtype.

    Of the same set and method on the same machine under the same settings, the later result counts.
    """

    def details(result):
        dtype = next((one["dtype"] for one in result["conditions"].values()), "")
        sampling = "sampled" if result["settings"]["do_sample"] else "greedy"
        room = f"{result['settings']['max_new_tokens']} tokens"
        return machine_name(result), Path(result["target"]).name, dtype, sampling, room

    columns = list(zip(*(details(result) for result in results)))
    differing = [i for i in range(len(columns)) if i == 0 or len(set(columns[i])) > 1]
    machines: dict[str, list[dict]] = {}
    for result in results:
        own = details(result)
        machines.setdefault(", ".join(own[i] for i in differing), []).append(result)
    for name, parts in machines.items():
        seen = Counter((row["set"], row["method"]) for result in parts for row in result["summary"])
        if twice := [f"{method} on {own}" for (own, method), count in seen.items() if count > 1]:
            logger.warning(f"{name}: several results for {', '.join(twice)}; the last one counts.")
    return machines


def rows_of(results: list[dict], kind: str) -> dict[tuple[str, str], dict]:
    """Rows of "summary" or "profile" by set and method, in the order of sets and METHODS."""
    rows = {(row["set"], row["method"]): row for result in results for row in result[kind]}
    sets = list(dict.fromkeys(name for name, _ in rows))
    return {key: rows[key] for key in sorted(rows, key=lambda key: (sets.index(key[0]), list(METHODS).index(key[1])))}


def rounds_of_methods(results: list[dict]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """(kept, drafted) of all whole rounds by set and method; plain decoding has none worth showing."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for key in rows_of(results, "summary"):
        latest = [one for one in results if any((row["set"], row["method"]) == key for row in one["summary"])][-1]
        records = [one for one in latest["records"] if (one["set"], one["method"]) == key]
        rounds = [pair for one in records for pair in whole_rounds(one, latest["settings"]["max_new_tokens"])]
        if rounds and key[1] != "plain":
            found[key] = rounds
    return found


# ---- the table


def table(machines: dict[str, list[dict]]) -> str:
    """Markdown: what was run, the numbers of every set and method, and where a round's time goes."""
    several = len(machines) > 1
    lines = [line for name, results in machines.items() for result in results for line in heading(name, result)]
    columns = ["set", "method", "tau", "tau by prompt", "speedup", "slowest", "tokens/s", "efficiency"]
    columns += ["bound: pass", "bound: bytes", "same tokens", "prompts"]
    lines += ["", *header(columns, several)]
    for name, results in machines.items():
        for row in rows_of(results, "summary").values():
            cells = [row["set"], LABELS[row["method"]], interval(row, "acceptance_length")]
            cells += [number(row["acceptance_length_per_prompt"]), interval(row, "speedup"), number(row["slowest"])]
            cells += [number(row["tokens_per_second"], 1)]
            cells += [number(row[key]) for key in ("efficiency", "efficiency_bound", "efficiency_bound_bytes")]
            cells += ["" if row["agreement"] is None else f"{row['agreement']:.0%}", str(row["prompts"])]
            lines.append("| " + " | ".join([name] * several + cells) + " |")
    lines += [
        "",
        "tau: tokens kept for each target pass, the target's own included, over all passes and as the mean of the "
        "prompts' own. Speedup: decoding seconds per token, plain "
        "/ method, median over prompts. Brackets: 95% bootstrap intervals over prompts. Efficiency: speedup / tau; "
        "bounds: what the target's own pass over as many tokens, and the bytes of all weights read, allow at most.",
    ]
    if any(result["profile"] for results in machines.values() for result in results):
        lines += ["", *header(["set", "method", *(f"{part}, ms" for part in PARTS), "round, ms"], several)]
        for name, results in machines.items():
            for row in rows_of(results, "profile").values():
                cells = [number(row["ms"].get(part), 1) for part in PARTS]
                cells = [row["set"], LABELS[row["method"]], *cells, number(sum(row["ms"].values()), 1)]
                lines.append("| " + " | ".join([name] * several + cells) + " |")
    return "\n".join(lines)


def header(columns: list[str], several: bool) -> list[str]:
    columns = ["machine"] * several + columns
    text = {"machine", "set", "method"}
    return [
        "| " + " | ".join(columns) + " |",
        "|" + "|".join(" --- " if column in text else " ---: " for column in columns) + "|",
    ]


def heading(name: str, result: dict) -> list[str]:
    settings, by_method = result["settings"], result["conditions"]
    same = {json.dumps(one, sort_keys=True) for one in by_method.values()}

    def said(one):
        return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in one.items())

    if len(same) == 1:
        conditions = ["  - the same for all methods: " + said(next(iter(by_method.values())))]
    else:
        conditions = [f"  - {LABELS[method]}: {said(one)}" for method, one in by_method.items()]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    lines = [f"- {name}: target {Path(result['target']).name}, {'sampled' if settings['do_sample'] else 'greedy'}"]
    lines += [*conditions, f"  - versions: {versions}"]
    if memory := [row for row in result["summary"] if row["peak_memory"]]:
        peaks = (f"{LABELS[row['method']]} {row['peak_memory'] / 2**30:.2f} GiB" for row in memory)
        lines.append("  - peak memory on the device, all methods loaded: " + ", ".join(peaks))
    elif result.get("peak_resident"):
        lines.append(f"  - peak resident memory, all methods loaded: {result['peak_resident'] / 2**30:.2f} GiB")
    lines += [f"  - {LABELS[method]} is left out: {reason}" for method, reason in result["skipped"].items()]
    return lines


def number(value, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def interval(row: dict, key: str) -> str:
    low, high = row[f"{key}_low"], row[f"{key}_high"]
    return number(row[key]) + ("" if low is None else f" [{low:.2f}, {high:.2f}]")


# ---- the plots


def panels(Figure, titles: list[str], width: float = 4.6, height: float = 3.0, columns: int | None = None):
    """A figure and one axis for each title."""
    columns = columns or min(2 if len(titles) <= 4 else 3, len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(width * columns, height * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, title in zip(axes, titles):
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.grid(axis="y", linewidth=0.4, alpha=0.5)
        axis.set_axisbelow(True)
    for axis in axes[len(titles) :]:
        axis.remove()
    return figure, list(axes[: len(titles)])


def legend(figure, axes) -> None:
    """One legend for all panels, under them."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels())}
    style = dict(loc="outside lower center", fontsize=8, frameon=False)
    figure.legend(handles.values(), handles, ncols=int(figure.get_figwidth() / 1.8), **style)


def draw_by_set(machines, Figure, key, label):
    """Bars of a number with its interval: sets along the axis, one bar for each method."""
    shown = {name: rows_of(results, "summary") for name, results in machines.items()}
    shown = {name: {k: row for k, row in rows.items() if k[1] != "plain" and row[key]} for name, rows in shown.items()}
    shown = {name: rows for name, rows in shown.items() if rows}
    if not shown:
        return None
    widest = max(len({own for own, _ in rows}) for rows in shown.values())
    figure, axes = panels(Figure, list(shown), width=max(5.5, 1.6 * widest), columns=1)
    for axis, rows in zip(axes, shown.values()):
        sets = list(dict.fromkeys(own for own, _ in rows))
        methods = [method for method in METHODS if any(method == other for _, other in rows)]
        width = 0.8 / len(methods)
        for i, method in enumerate(methods):
            at = [(j, rows[own, method]) for j, own in enumerate(sets) if (own, method) in rows]
            x, values = [j + (i + 0.5) * width - 0.4 for j, _ in at], [row[key] for _, row in at]
            style = dict(width=width, color=COLOURS[method], edgecolor="black", linewidth=0.4, label=LABELS[method])
            # A median need not lie in the middle of its interval, but it lies inside.
            limits = [[row[f"{key}_{side}"] for _, row in at] for side in ("low", "high")]
            errors = [
                [abs(value - limit) if limit is not None else 0 for value, limit in zip(values, side)]
                for side in limits
            ]
            axis.bar(x, values, yerr=errors, error_kw={"linewidth": 0.8, "capsize": 2}, **style)
        axis.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axis.set_xticks(range(len(sets)), sets)
        axis.set_ylabel(label, fontsize=9)
    legend(figure, axes)
    return figure


def draw_speedup(machines, Figure):
    return draw_by_set(machines, Figure, "speedup", "speedup over plain")


def draw_acceptance_length(machines, Figure):
    return draw_by_set(machines, Figure, "acceptance_length", "acceptance length $\\tau$")


def draw_lines(machines, Figure, points, x_label, y_label):
    """One panel for each set and machine, one line for each method; `points` maps its rounds to x and y."""
    found = {name: rounds_of_methods(results) for name, results in machines.items()}
    places = list(dict.fromkeys((name, own) for name, rounds in found.items() for own, _ in rounds))
    if not places:
        return None
    titles = [own if len(machines) == 1 else f"{own}\n{name}" for name, own in places]
    figure, axes = panels(Figure, titles)
    for axis, (name, own) in zip(axes, places):
        for (other, method), rounds in found[name].items():
            if other == own:
                style = dict(color=COLOURS[method], marker=MARKERS[method], markersize=5, markeredgewidth=0.5)
                style |= {"markeredgecolor": "black", "linewidth": 1.2, "label": LABELS[method]}
                if method in YARDSTICKS:  # these often lie right on the line that they are compared with
                    style |= {"linestyle": "--", "markerfacecolor": "none", "markersize": 8}
                    style["markeredgecolor"] = COLOURS[method]
                axis.plot(*points(rounds), **style)
        most = max(int(line.get_xdata()[-1]) for line in axis.lines)
        axis.set_xticks(range(1, most + 1, 1 if most <= 12 else 2))
        axis.set_ylim(bottom=0)
        axis.set_xlabel(x_label, fontsize=9)
        axis.set_ylabel(y_label, fontsize=9)
    legend(figure, axes)
    return figure


def histogram(rounds) -> tuple[list[int], list[float]]:
    """Share of rounds that kept 1, 2, 3, ... tokens, up to the most that could be kept."""
    counts, most = Counter(kept for kept, _ in rounds), max(drafted for _, drafted in rounds) + 1
    return list(range(1, most + 1)), [counts[kept] / len(rounds) for kept in range(1, most + 1)]


def kept_by_position(rounds) -> tuple[list[int], list[float]]:
    """Of the rounds with an i-th draft, the share that kept it, for i = 1, 2, 3, ..."""
    positions = range(1, max(drafted for _, drafted in rounds) + 1)
    drafted = {i: [kept > i for kept, count in rounds if count >= i] for i in positions}
    return list(positions), [sum(drafted[i]) / len(drafted[i]) for i in positions]


def draw_histogram(machines, Figure):
    return draw_lines(machines, Figure, histogram, "tokens kept in a round", "share of rounds")


def draw_kept_by_position(machines, Figure):
    return draw_lines(machines, Figure, kept_by_position, "draft position", "share kept")


def draw_round(machines, Figure):
    """Stacked bars of a round's time, one for each method, in a panel for each set and machine."""
    found = {name: rows_of(results, "profile") for name, results in machines.items()}
    places = list(dict.fromkeys((name, own) for name, rows in found.items() for own, _ in rows))
    if not places:
        return None
    titles = [own if len(machines) == 1 else f"{own}\n{name}" for name, own in places]
    methods = max(sum(own == other for other, _ in found[name]) for name, own in places)
    figure, axes = panels(Figure, titles, width=5.2, height=max(1.4, 0.7 + 0.3 * methods))
    for axis, (name, own) in zip(axes, places):
        rows = {method: row["ms"] for (other, method), row in found[name].items() if other == own}
        left = [0.0] * len(rows)
        for part in PARTS:
            # What is too short to be told from the clock's noise can come out below nothing.
            values = [max(0.0, ms.get(part, 0.0)) for ms in rows.values()]
            if any(values):
                style = dict(color=PART_COLOURS[part], edgecolor="black", linewidth=0.4, label=part)
                axis.barh(range(len(rows)), values, left=left, **style)
                left = [a + b for a, b in zip(left, values)]
        axis.set_yticks(range(len(rows)), [LABELS[method] for method in rows])
        axis.invert_yaxis()
        axis.set_xlim(right=1.03 * max(left))
        axis.grid(axis="y", visible=False)
        axis.grid(axis="x", linewidth=0.4, alpha=0.5)
        axis.set_xlabel("ms a round", fontsize=9)
    legend(figure, axes)
    return figure


PLOTS = {
    "speedup": draw_speedup,
    "acceptance_length": draw_acceptance_length,
    "acceptance_histogram": draw_histogram,
    "kept_by_position": draw_kept_by_position,
    "round_time": draw_round,
}
