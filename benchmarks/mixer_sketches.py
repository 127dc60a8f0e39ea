"""Draw the data flow of a mixer as an SVG: what one forward pass calls, in which order, with the shapes it records.

Nothing is drawn by hand. Hooks record the calls of the mixer's modules, a wrapper those of its functional form, and the
graph of autograd says which tensor was made from which. Sizes are written as letters: a size that is an option of the
mixer, or the length of the input, has the letter of that option.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from textwrap import wrap
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import torch
from torch import Tensor, nn

from tokenmix import functional
from tokenmix.lab.report.pictures import values_attention
from tokenmix.mixers import MIXERS, build_mixer
from tokenmix.mixers.facts import mixer_options

SIZES = {"B": 3, "T": 23, "D": 80}
OTHER_SIZES = {"B": 17, "T": 29, "D": 124}
"""Two inputs that share no size, so that a letter that only fits one of them is found out."""
OPTIONS = {
    "max_len": (37, "N", "positions (max_len)"),
    "heads": (4, "H", "heads"),
    "rank": (6, "R", "rank"),
    "slots": (13, "S", "slots"),
    "kernel_size": (9, "K", "taps"),
    "window": (5, "", ""),
    "reaches": (7, "R", "decays"),
    "num_features": (11, "M", "random features per head"),
    "factor": (5, "a", "width of the first factor"),
}
"""Of options that mixers may have: a value no other size has, and the letter of the mixers' pages with its meaning."""
WIDTH, MARGIN, GAP, LINE = 380, 8, 5, 15
INK, QUIET, EDGE = "#24292f", "#57606a", "#8c959f"
FILLS = {"tensor": "#ffffff", "module": "#ddf4ff", "form": "#fff8c5"}


@dataclass
class Step:
    """A tensor, a module or the functional form, with the steps it reads."""

    name: str
    kind: str
    lines: list[str]
    reads: list[str] = field(default_factory=list)


@dataclass
class Port:
    """An argument of the functional form: its shape, what it is made from, and the parameters among that."""

    name: str
    lines: list[str]
    reads: list[str]


@dataclass
class Flow:
    """What one forward pass of a mixer has called."""

    before: list[Step]
    form: Step
    ports: list[Port]
    after: list[Step]
    letters: list[str]


class Names:
    """Write sizes as letters, and remember which letters were used."""

    def __init__(self, options: dict[str, Any], sizes: dict[str, int]) -> None:
        known = [(OPTIONS[option], size) for option, size in options.items() if option in OPTIONS]
        given = {letter: size for (_, letter, _), size in known if letter}
        self.meanings = {"B": "sequences", "T": "tokens", "D": "features"}
        self.meanings |= {letter: meaning for (_, letter, meaning), _ in known if letter}
        if "H" in given:
            given["e"], self.meanings["e"] = sizes["D"] // given["H"], "features per head"
        if "a" in given:  # a times b is N or more
            given["b"], self.meanings["b"] = -(-given["N"] // given["a"]), "width of the second factor"
        self.known = {size: letter for letter, size in (given | sizes).items()}
        for a, b in combinations(given, 2):
            self.known.setdefault(given[a] * given[b], a + b)
        self.known |= {times * sizes["D"]: f"{times}D" for times in range(2, 5)}
        self.used: list[str] = []

    def size(self, n: int) -> str:
        """Write one size: its letter, a multiple of D, a product of two options, or the number itself."""
        letters = self.known.get(n, str(n))
        self.used += letters
        return letters

    def shape(self, given: Tensor) -> str:
        """Write a shape, such as B×T×D."""
        return "×".join(map(self.size, given.shape)) or "a number"


def flow(name: str, sizes: dict[str, int] | None = None) -> Flow:
    """Run a mixer once and return what it called, in order."""
    sizes = SIZES if sizes is None else sizes
    cls = MIXERS[name]
    known = mixer_options(cls)
    options = cls.example_options(OPTIONS["max_len"][0]) | {
        key: size for key, (size, _, _) in OPTIONS.items() if key in known
    }
    torch.manual_seed(0)
    mixer = build_mixer(name, sizes["D"], causal=cls.facts.causal, **options)
    return _Recorder(mixer, options, sizes).run()


class _Recorder:
    """Follow one forward pass."""

    def __init__(self, mixer: Any, options: dict[str, Any], sizes: dict[str, int]) -> None:
        self.mixer, self.names = mixer, Names(options, sizes)
        self.x = torch.randn(sizes["B"], sizes["T"], sizes["D"], requires_grad=True)
        self.made: dict[Any, str] = {}  # nodes of autograd, and ids of leaves, by the step that made them
        self.leaves = {id(p): key for key, p in mixer.named_parameters()}
        self.steps: list[Step] = []
        self.form: Step | None = None
        self.ports: list[Port] = []

    def run(self) -> Flow:
        self.made[id(self.x)] = "x"
        self.steps.append(Step("x", "tensor", [self.names.shape(self.x)]))
        hooks = [
            child.register_forward_hook(self._called(key))
            for key, child in self.mixer.named_children()
            if isinstance(child, nn.Module)
        ]
        form = self.mixer.facts.functional_form()
        try:
            with patch.object(functional, form.__name__, self._wrapped(form)):
                y = self.mixer(self.x)
        finally:
            for hook in hooks:
                hook.remove()
        if self.form is None:
            raise RuntimeError(f"{type(self.mixer).__name__} did not call {form.__name__}")
        weights = values_attention(self.mixer, self.x[:1].detach())
        if weights is not None:
            self.form.lines.insert(1, f"a sum over v, with weights {self.names.shape(weights)}")
        at = self.steps.index(self.form)
        end = Step("y", "tensor", [self.names.shape(y)], self._sources([y])[0])
        letters = [f"{letter} {what}" for letter, what in self.names.meanings.items() if letter in self.names.used]
        return Flow(self.steps[:at], self.form, self.ports, [*self.steps[at + 1 :], end], letters)

    def _called(self, key: str) -> Any:
        def hook(module: nn.Module, given: tuple, out: Any) -> None:
            if not given or not isinstance(out, Tensor):  # it hands out its parameters, which are leaves of the graph
                return
            kind = type(module).__name__
            if isinstance(module, nn.Linear):
                kind = f"{self.names.size(module.in_features)} → {self.names.size(module.out_features)}"
            reads = self._sources(given)[0]
            self.steps.append(Step(key, "module", [kind, self.names.shape(out)], reads))
            self.made[out.grad_fn] = key

        return hook

    def _wrapped(self, form: Any) -> Any:
        names = list(inspect.signature(form).parameters)

        def called(*args: Any, **options: Any) -> Tensor:
            out = form(*args, **options)
            for port, value in [*zip(names, args, strict=False), *options.items()]:
                given = [value] if isinstance(value, Tensor) else list(value) if isinstance(value, tuple) else []
                if given and all(isinstance(part, Tensor) for part in given):
                    self.ports.append(self._port(port, given))
            idea = type(self.mixer).facts.about.idea
            reads = list(dict.fromkeys(key for port in self.ports for key in port.reads))
            self.form = Step(form.__name__, "form", [idea, self.names.shape(out)], reads)
            self.steps.append(self.form)
            self.made[out.grad_fn] = form.__name__
            return out

        return called

    def _port(self, name: str, given: list[Tensor]) -> Port:
        reads, learned = self._sources(given)
        shapes = [self.names.shape(part) for part in given]
        if all(id(part) in self.leaves for part in given):
            return Port(name, [*shapes, "learned"], reads)
        made_of = [f"{key.rpartition('.')[2]} {self.names.shape(p)}" for key, p in learned.items()]
        if not reads and not learned:
            made_of = ["fixed"]
        return Port(name, [*shapes, *made_of], reads)

    def _sources(self, given: Iterable[Any]) -> tuple[list[str], dict[str, Tensor]]:
        """Return the nearest steps that tensors were made from, and the parameters on the way."""
        open_nodes = []
        reads: list[str] = []
        learned: dict[str, Tensor] = {}
        for part in given:
            if isinstance(part, Tensor) and part.grad_fn is not None:
                open_nodes.append(part.grad_fn)
            elif isinstance(part, Tensor):
                self._leaf(part, reads, learned)
        seen = set()
        while open_nodes:
            node = open_nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.made:
                reads.append(self.made[node])
            elif hasattr(node, "variable"):
                self._leaf(node.variable, reads, learned)
            else:
                open_nodes += [above for above, _ in node.next_functions]
        order = [step.name for step in self.steps]
        return sorted(set(reads), key=order.index), dict(sorted(learned.items(), key=lambda item: item[0]))

    def _leaf(self, leaf: Tensor, reads: list[str], learned: dict[str, Tensor]) -> None:
        if id(leaf) in self.made:
            reads.append(self.made[id(leaf)])
        elif id(leaf) in self.leaves:
            learned[self.leaves[id(leaf)]] = leaf


def said(found: Flow) -> str:
    """Say a flow in words: which step reads which."""
    form = found.form.name
    calls = [f"{step.name} reads {_list_names(step.reads)}" for step in found.before if step.reads]
    given = [f"{port.name} from {_list_names(port.reads)}" if port.reads else port.name for port in found.ports]
    last = [f"{step.name} reads {_list_names(step.reads)}" for step in found.after]
    return f"Flow of data from x to y: {'; '.join([*calls, f'{form} takes {_list_names(given)}', *last])}."


def legend(found: Flow) -> str:
    """Say what the letters of a flow stand for."""
    return ", ".join(found.letters)


def _list_names(names: list[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), *names[-1:]])


@dataclass
class _Box:
    """A box of the drawing: its columns (from, to) in units of the drawing, its layer, and its text."""

    left: float
    right: float
    layer: int
    lines: list[str]
    kind: str
    top: float = 0.0
    height: float = 0.0


def svg(found: Flow) -> str:
    """Return a flow as the text of an SVG, legible at the width of a telephone."""
    columns = (WIDTH - 2 * MARGIN) / len(found.ports)
    spans = _spans(found)
    layers = _layers(found)
    boxes: dict[str, _Box] = {}
    for layer in range(max(layers.values()) + 1):
        for span in sorted({spans[key] for key, at in layers.items() if at == layer}):
            keys = [step.name for step in found.before if layers[step.name] == layer and spans[step.name] == span]
            left, right = MARGIN + span[0] * columns, MARGIN + (span[1] + 1) * columns
            each = (right - left) / len(keys)
            for i, key in enumerate(keys):
                step = next(step for step in found.before if step.name == key)
                box = _Box(left + i * each, left + (i + 1) * each, layer, [key, *step.lines], step.kind)
                boxes[key] = box
    return _Drawing(found, boxes, columns).text()


def _spans(found: Flow) -> dict[str, tuple[int, int]]:
    """Return the first and last argument of the form that each step leads to."""
    leads: dict[str, set[int]] = {step.name: set() for step in found.before}
    for i, port in enumerate(found.ports):
        for key in port.reads:
            leads[key].add(i)
    for step in reversed(found.before):
        for key in step.reads:
            leads[key] |= leads[step.name]
    return {key: (min(at), max(at)) if at else (0, len(found.ports) - 1) for key, at in leads.items()}


def _layers(found: Flow) -> dict[str, int]:
    layers: dict[str, int] = {}
    for step in found.before:
        layers[step.name] = 1 + max((layers[key] for key in step.reads), default=-1)
    return layers


class _Drawing:
    """Put boxes and lines onto a page."""

    def __init__(self, found: Flow, boxes: dict[str, _Box], columns: float) -> None:
        self.found, self.boxes, self.columns = found, boxes, columns
        self.lines = ElementTree.Element("g", {"stroke": EDGE, "stroke-width": "1.2", "fill": "none"})
        self.shapes = ElementTree.Element("g")

    def text(self) -> str:
        y = float(MARGIN)
        for layer in sorted({box.layer for box in self.boxes.values()}):
            here = [box for box in self.boxes.values() if box.layer == layer]
            height = max(map(self._height, here))
            for box in here:
                box.top, box.height = y, height
                self._box(box.left, box.right, y, height, box.lines, box.kind)
            y += height + 22
        for step in self.found.before:
            for key in step.reads:
                a, b = self.boxes[key], self.boxes[step.name]
                self._edge((a.left, a.right), a.top + a.height, (b.left, b.right), b.top)
        y = self._form(y)
        for step in self.found.after:
            lines = [step.name, *step.lines]
            width = 130
            left = (WIDTH - width) / 2
            height = self._text_height(lines)
            self._edge((left, left + width), y - 22, (left, left + width), y)
            self._box(left, left + width, y, height, lines, step.kind)
            y += height + 22
        height = y - 22 + MARGIN
        root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {WIDTH} {height:g}",
                "width": str(WIDTH),
                "height": f"{height:g}",
                "font-family": "Arial, Helvetica, sans-serif",
                "font-size": "12",
                "text-anchor": "middle",
            },
        )
        ElementTree.SubElement(root, "title").text = said(self.found)
        ElementTree.SubElement(root, "desc").text = legend(self.found)
        ElementTree.SubElement(root, "rect", {"width": str(WIDTH), "height": f"{height:g}", "fill": "#ffffff"})
        root.append(self.lines)
        root.append(self.shapes)
        ElementTree.indent(root)
        return ElementTree.tostring(root, encoding="unicode") + "\n"

    def _form(self, y: float) -> float:
        """Draw the functional form with its arguments along the top; return where the next box begins."""
        form, ports = self.found.form, self.found.ports
        room = int(self.columns / 6.6)
        cells = [
            [*_broken(port.name, room), *(part for line in port.lines for part in wrap(line, room))] for port in ports
        ]
        top = max(map(len, cells)) * LINE + 8
        below = [form.name, *(part for line in form.lines for part in wrap(line, 56))]
        height = top + len(below) * LINE + 14
        self._rect(MARGIN, WIDTH - MARGIN, y, height, "form")
        for i, (port, cell) in enumerate(zip(ports, cells, strict=True)):
            left = MARGIN + i * self.columns
            named = len(_broken(port.name, room))
            for j, line in enumerate(cell):
                self._line(left + self.columns / 2, y + 17 + j * LINE, line, bold=j < named)
            for key in port.reads:
                box = self.boxes[key]
                self._edge((box.left, box.right), box.top + box.height, (left, left + self.columns), y)
        line = {"x1": str(MARGIN), "x2": str(WIDTH - MARGIN), "y1": f"{y + top:g}", "y2": f"{y + top:g}"}
        ElementTree.SubElement(self.shapes, "line", {**line, "stroke": EDGE, "stroke-dasharray": "3 3"})
        for j, text in enumerate(below):
            self._line(WIDTH / 2, y + top + 17 + j * LINE, text, bold=j == 0)
        return y + height + 22

    def _height(self, box: _Box) -> float:
        return self._text_height(self._fitted(box.lines, box.right - box.left)[0])

    def _text_height(self, lines: list[str]) -> float:
        return len(lines) * LINE + 10

    def _fitted(self, lines: list[str], width: float) -> tuple[list[str], int]:
        """Break the lines of a box to its width; return them and how many hold the name."""
        room = max(4, int((width - GAP) / 6.6))
        name = _broken(lines[0], room)
        return [*name, *(part for line in lines[1:] for part in wrap(line, room, break_long_words=False))], len(name)

    def _box(self, left: float, right: float, top: float, height: float, lines: list[str], kind: str) -> None:
        self._rect(left + GAP / 2, right - GAP / 2, top, height, kind)
        fitted, named = self._fitted(lines, right - left)
        start = top + (height - len(fitted) * LINE) / 2 + 11.5
        for j, line in enumerate(fitted):
            self._line((left + right) / 2, start + j * LINE, line, bold=j < named)

    def _rect(self, left: float, right: float, top: float, height: float, kind: str) -> None:
        place = {"x": f"{left:g}", "y": f"{top:g}", "width": f"{right - left:g}", "height": f"{height:g}"}
        ElementTree.SubElement(self.shapes, "rect", {**place, "rx": "5", "fill": FILLS[kind], "stroke": EDGE})

    def _line(self, x: float, y: float, text: str, *, bold: bool) -> None:
        style = {"fill": INK, "font-weight": "bold"} if bold else {"fill": QUIET, "font-size": "11"}
        ElementTree.SubElement(self.shapes, "text", {"x": f"{x:g}", "y": f"{y:g}", **style}).text = text

    def _edge(self, a: tuple[float, float], low: float, b: tuple[float, float], high: float) -> None:
        """Draw an arrow from below a box to the top of another, straight down where they overlap."""
        left, right = max(a[0], b[0]), min(a[1], b[1])
        start = end = (left + right) / 2
        if right <= left:
            start, end = sum(a) / 2, sum(b) / 2
        ElementTree.SubElement(self.lines, "path", {"d": f"M{start:g} {low:g} L{end:g} {high:g}"})
        head = f"M{end - 4:g} {high - 6:g} L{end:g} {high:g} L{end + 4:g} {high - 6:g}"
        ElementTree.SubElement(self.lines, "path", {"d": head})


def _broken(name: str, room: int) -> list[str]:
    """Break a name after an underscore where it is longer than its room."""
    if len(name) <= room or "_" not in name:
        return [name]
    parts = [part + "_" for part in name.split("_")]
    parts[-1] = parts[-1][:-1]
    lines = [""]
    for part in parts:
        lines = [*lines[:-1], lines[-1] + part] if len(lines[-1] + part) <= room else [*lines, part]
    return [line for line in lines if line]
