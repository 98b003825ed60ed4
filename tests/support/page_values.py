"""What the page of a run has to show: from the files of its folder, by other formulas than the page's.

All comes from the lines of metrics.jsonl, but for the limit of gradient clipping and the layout (config.json) and the
peak of the device and the unigram entropy (the event `summary`), which no step has.
"""

import json
import re
import time
from itertools import groupby
from math import ceil
from statistics import fmean, median

import pytest

from tests.support.shown_page import ShownPage, check_drawing, shows

MAX_POINTS, WINDOW, MARGIN, UNSTABLE, FINAL_STEPS = 300, 20, 0.1, 1.2, 10
"""Of a curve; of a gradient spike: the norms before it, and how far it is above their mean; of a loss ratio; of the
final loss."""
LINES = ("grad_norm", "lr", "tokens_per_s", "step_s", "mfu", "data_wait_s", "param_norm", "variance_norm")
STEADY = ("sequence_length", "num_sequences")
"""Shown only where they change."""
PARTS = ("detect_s", "agree_s", "repair_s", "regroup_s")
MESSAGES = ("notice", "move", "drain", "balance", "preemption", "restart")


class RunValues:
    """The values of a run that began at step 0 and has ended, and whose leader (rank 0) has lived: another one has
    timed the steps itself."""

    def __init__(self, folder):
        read = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("config", "summary")}
        self.name, self.config, self.summary = folder.name, read["config"], read["summary"]
        self.lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.steps = [line for line in self.lines if "event" not in line]
        assert [line["step"] for line in self.steps] == [*range(1, len(self.steps) + 1)]
        self.changes, self.evaluations = self.events("membership"), self.events("evaluation")
        begun = max(line["step"] for line in self.events("started") + self.events("restart"))
        assert len(self.steps) - begun >= FINAL_STEPS, "the final loss would be that of fewer steps"
        self.timed = [line for line in self.steps if "step_s" in line]
        """All but a step that a change of membership has interrupted when it was done."""
        self.attempt = [line for line in self.timed if line["step"] > begun]
        self.attempt_s = sum(line["step_s"] for line in self.attempt)
        losses = [line["loss"] for line in self.steps]
        self.ratios = [loss / min(losses[:number]) for number, loss in enumerate(losses) if number]

    def events(self, kind):
        return [line for line in self.lines if line.get("event") == kind]

    def column(self, name, factor=1.0):
        return [(line["step"], factor * line[name]) for line in self.steps if line.get(name) is not None]

    # --- curves -------------------------------------------------------------------------------------------------------

    def curves(self):
        """Points by chart, and by the label and the kind of the curve."""
        own, curves = (self.name, "line"), {}
        curves["loss"] = {
            ("training", "line"): self.column("loss"),
            ("evaluation", "dots"): [(line["step"], line["loss"]) for line in self.evaluations],
            ("spikes", "spikes"): self.loss_spikes(),
        }
        curves["loss_ratio"] = {own: [*enumerate(self.ratios, start=2)]}
        curves |= {name: {own: self.column(name)} for name in (*LINES, "variance_max")}
        curves["grad_norm"]["spikes", "spikes"] = [max(each, key=lambda at: at[1]) for each in self.gradient_spikes()]
        curves["memory_bytes"] = {own: self.column("memory_bytes", 1e-6)}
        curves["bubble"] = {
            ("measured", "line"): self.column("bubble"),
            ("planned", "planned"): self.column("planned_bubble"),
        }
        if self.changes:
            curves["widths-0"] = {
                (f"stage {stage}", "stairs"): self.widths(stage) for stage in range(len(self.changes[0]["widths"]))
            }
        for name in STEADY:
            if len({line[name] for line in self.steps}) > 1:
                curves[name] = {(self.name, "stairs"): self.column(name)}
        found = {name: {key: points for key, points in each.items() if points} for name, each in curves.items()}
        return {name: each for name, each in found.items() if each}

    def loss_spikes(self):
        """The highest loss of each row of steps above 1.2 times the lowest before."""
        losses = zip(self.column("loss")[1:], self.ratios)
        rows = [[*row] for is_high, row in groupby(losses, lambda at: at[1] > UNSTABLE) if is_high]
        return [max((point for point, _ in row), key=lambda point: point[1]) for row in rows]

    def gradient_spikes(self):
        """Rows of (step, norm) that are above the mean of the 20 before by more than 0.1."""
        norms = [line["grad_norm"] for line in self.steps]
        means = {step: fmean(norms[step - 1 - WINDOW : step - 1]) for step in range(WINDOW + 1, len(norms) + 1)}
        rows = groupby(enumerate(norms, start=1), lambda at: at[0] in means and at[1] > means[at[0]] + MARGIN)
        return [[*row] for is_high, row in rows if is_high]

    def widths(self, stage):
        first, last = self.changes[0]["widths_before"], self.changes[-1]["widths"]
        after = [(line["step"], line["widths"][stage]) for line in self.changes]
        return [(1, first[stage]), *after, (len(self.steps), last[stage])]

    def references(self):
        """Values of the horizontal lines by chart."""
        [*_, summary] = self.events("summary")
        clip = self.config["optimizer"]["max_grad_norm"]
        return {"loss": [summary["unigram_entropy"]], "loss_ratio": [UNSTABLE], "grad_norm": [clip]}

    # --- figures ------------------------------------------------------------------------------------------------------

    def figures(self, dollars_per_hour=None):
        """The table: numbers, which the page rounds, and texts."""
        best, parallel = min(self.evaluations, key=lambda line: line["loss"]), self.config["parallel"]
        saved, restarts, num_legs = self.checkpoints(), self.events("restart"), len(self.events("started"))
        [*_, parameters] = re.findall(r"model: ([\d,]+) parameters", " ".join(text for _, text in self.messages()))
        figures = {
            "steps": self.steps[-1]["step"],
            "tokens": self.steps[-1]["tokens"],
            "final loss": fmean(line["loss"] for line in self.steps[-FINAL_STEPS:]),
            "best evaluation": f"{best['loss']:.4f} (step {best['step']:,})",
            "tokens/s": self.tokens_of_attempt() / self.attempt_s,
            "MFU": self.mfu(),
            "bubble, measured": self.measured_bubble(),
            "bubble, planned": self.attempt[-1]["planned_bubble"],
            "steps above 1.2 x lowest loss": sum(ratio > UNSTABLE for ratio in self.ratios),
            "gradient spikes": len(self.gradient_spikes()),
            "workers lost": sum(len(line["who"]) for line in self.changes),
            "workers joined": sum(len(line["joined"]) for line in self.changes),
            "seconds that changes have cost": float(sum(map(seconds_of, self.changes))),
            "restarts": len(restarts),
            "steps lost by restarts": sum(line["lost_steps"] for line in restarts),
            "wall-clock time": self.wall_s(),
            "goodput (productive share of the time)": self.productive_s() / self.wall_s(),
            "layout": f"{parallel['pp_size']} stages x {parallel['dp_size']} replicas x tp {parallel['tp_size']}",
            "parameters": int(parameters.replace(",", "")),
        }
        if saved:
            figures["checkpoints saved"] = f"{len(saved):,} (newest: step {max(saved):,})"
        if num_legs > 1:
            figures["legs (the first one and resumes)"] = num_legs
        return figures if dollars_per_hour is None else {**figures, **self.dollars(dollars_per_hour)}

    def dollars(self, per_hour):
        all_of_it = per_hour * self.wall_s() / 3600
        evaluations = per_hour * sum(line["seconds"] for line in self.evaluations) / 3600
        for_a_token = all_of_it / self.steps[-1]["tokens"]
        return {
            "dollars so far": all_of_it,
            "dollars of evaluations": evaluations,
            "dollars without evaluations": all_of_it - evaluations,
            "dollars for a million tokens": for_a_token * 1e6,
            "dollars for 4 million tokens (HLAT's CPT)": for_a_token * 4e6,
            "dollars for a trillion tokens": for_a_token * 1e12,
        }

    def tokens_of_attempt(self):
        return sum(line["sequence_length"] * line["num_sequences"] for line in self.attempt)

    def mfu(self):
        """Work of the newest attempt / what its ranks could have done meanwhile."""
        [*_, summary] = self.events("summary")
        parallel, changes = self.config["parallel"], {line["step"]: sum(line["widths"]) for line in self.changes}
        num_ranks, rank_s = parallel["pp_size"] * parallel["dp_size"], 0.0
        for line in self.attempt:
            num_ranks = changes.get(line["step"], num_ranks)
            rank_s += num_ranks * parallel["tp_size"] * line["step_s"]
        return summary["flops_per_s"] * self.attempt_s / rank_s / summary["peak_flops_per_s"]

    def measured_bubble(self):
        """The median of the steps since the newest change of membership."""
        since = max((line["step"] for line in self.changes), default=0)
        return median(line["bubble"] for line in self.attempt if line["step"] >= since)

    def productive_s(self):
        return sum(line["step_s"] for line in self.timed) + sum(line["seconds"] for line in self.evaluations)

    def wall_s(self):
        """From each leg's start to its last line; lines after the last one with a time have lasted some seconds."""
        starts = [number for number, line in enumerate(self.lines) if line.get("event") == "started"]
        seconds = 0.0
        for start, end in zip(starts, [*starts[1:], len(self.lines)]):
            leg = self.lines[start:end]
            timed = max(number for number, line in enumerate(leg) if "time" in line)
            seconds += leg[timed]["time"] - leg[0]["time"]
            seconds += sum(line.get("step_s", line.get("seconds", 0.0)) for line in leg[timed + 1 :])
        return seconds

    # --- tables -------------------------------------------------------------------------------------------------------

    def messages(self):
        told = [line for line in self.lines if line.get("event") in MESSAGES and "text" in line]
        return [(clock(line["time"]), line["text"]) for line in told]

    def checkpoints(self):
        """Megabytes and time of each checkpoint, by step."""
        found = [(re.match(r"saved step (\d+): .*, ([\d.]+) MB", text), at) for at, text in self.messages()]
        return {int(match[1]): (match[2], at) for match, at in found if match}

    def status(self):
        code, text = self.summary["exit_code"], self.summary["message"]
        steps = f"{len(self.steps):,} of {self.config['run']['num_steps']:,} steps"
        return f"finished, {steps}" if code == 0 else f"ended with code {code}, {steps}: {text}"


def seconds_of(change):
    return sum(change[part] or 0.0 for part in PARTS)


def clock(seconds):
    return time.strftime("%m-%d %H:%M:%S", time.gmtime(seconds))


def windows(points):
    """Step, mean, lowest and highest value of as few points as make at most MAX_POINTS windows."""
    size = ceil(len(points) / MAX_POINTS)
    cut = [points[start : start + size] for start in range(0, len(points), size)]
    values = [[value for _, value in each] for each in cut]
    return [(each[-1][0], fmean(found), min(found), max(found)) for each, found in zip(cut, values)]


# --- comparison -------------------------------------------------------------------------------------------------------


def check_page(folder, *, dollars_per_hour=None):
    """Compares all that the page of a run shows with the files of its folder; returns the values."""
    values, shown = RunValues(folder), ShownPage((folder / "report.html").read_text())
    check_curves(shown, values)
    check_figures(shown, values, dollars_per_hour)
    check_tables(shown.tables, values)
    assert shown.statuses == [values.status()]
    return values


def check_curves(shown, values):
    expected, references = values.curves(), values.references()
    assert {*shown.charts} == {*shown.drawings} == {*expected}
    marks = [line["step"] for line in values.changes]
    for name, chart in shown.charts.items():
        drawn = {(series["label"], series["kind"]): series["curve"] for series in chart["series"]}
        assert len(chart["series"]) == len(drawn) and {*drawn} == {*expected[name]}, name
        for label, curve in drawn.items():
            found = [*zip(curve["x"], curve["mean"], curve["low"], curve["high"], strict=True)]
            wanted = windows(expected[name][label])
            assert len(found) == len(wanted), (name, label)
            for ours, theirs in zip(found, wanted):
                assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-15), (name, label)
        assert [line["value"] for line in chart["references"]] == references.get(name, []), name
        assert [step for step, _ in chart["marks"]] == ([] if name == "widths-0" else marks), name
        check_drawing(shown, name)


def check_figures(shown, values, dollars_per_hour):
    expected = values.figures(dollars_per_hour)
    assert {*shown.figures} == {*expected}
    for name, text in shown.figures.items():
        assert shows(text, expected[name]), (name, text, expected[name])
    [bubbles] = shown.pipelines
    for text, name in zip(bubbles.split(", "), ("measured", "planned"), strict=True):
        assert text.startswith(f"bubble {name} ") and shows(text.split()[-1], expected[f"bubble, {name}"])


def check_tables(tables, values):
    ratios = dict(enumerate(values.ratios, start=2))
    rows = tables.get("Changes of membership", [[]])[1:]
    for (step, what, widths, seconds, ratio), line in zip(rows, values.changes, strict=True):
        lost, joined = line["who"], [f"worker {each['rank']} ({each['coordinates']}) joins" for each in line["joined"]]
        assert (step, what) == (f"{line['step']:,}", "; ".join([*([line["why"]] if lost else []), *joined]))
        assert widths == " to ".join("/".join(map(str, line[each])) for each in ("widths_before", "widths"))
        assert shows(seconds, seconds_of(line)) and shows(ratio, ratios[line["step"]])
    evaluations = [[f"{line['step']:,}", f"{line['loss']:.4f}"] for line in values.evaluations]
    assert tables["Evaluations"][1:] == evaluations
    saved = [[f"{step:,}", megabytes, at, ""] for step, (megabytes, at) in sorted(values.checkpoints().items())]
    assert tables.get("Checkpoints", [[]])[1:] == saved
    assert [*map(tuple, tables["Messages"][1:])] == values.messages()
