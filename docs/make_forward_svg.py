"""Draw ``forward.svg``: the stages of a first call, and what a later call does.

python docs/make_forward_svg.py
"""

from __future__ import annotations

from pathlib import Path

STAGES = [
    ("trace", "Dynamo, once,", "fake tensors"),
    ("split", "cut at the", "splitting ops"),
    ("dedupe", "find layers", "that are alike"),
    ("compile", "each unique", "piece once"),
    ("generate", "one line per", "piece and op"),
]
HOOKS = {1: "piecework_splitting_ops", 3: "piecework_compile_piece"}
CALL = ["checks", "piece 0", "attention", "piece 1", "attention", "piece 2", "result"]
INK, PIECE, OP, PAPER = "#1f2933", "#3b82c4", "#e0912f", "#eef2f6"


def box(x: int, y: int, width: int, height: int, lines: list[str], fill: str, ink: str) -> str:
    texts = "".join(
        f'<text x="{x + width / 2}" y="{y + height / 2 + 5 + 17 * (i - (len(lines) - 1) / 2)}" fill="{ink}" '
        f'font-weight="{"bold" if i == 0 else "normal"}">{line}</text>'
        for i, line in enumerate(lines)
    )
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{fill}"/>{texts}'


def arrow(x: int, y: int) -> str:
    return f'<path d="M{x} {y} h14 m-6 -5 l6 5 l-6 5" stroke="{INK}" fill="none" stroke-width="1.6"/>'


def drawing() -> str:
    parts = [f'<text x="16" y="28" class="title" fill="{INK}">First call: made once</text>']
    for i, (name, *rest) in enumerate(STAGES):
        x = 16 + i * 152
        parts.append(box(x, 42, 132, 74, [name, *rest], PAPER, INK))
        if i < len(STAGES) - 1:
            parts.append(arrow(x + 135, 79))
        if i in HOOKS:
            parts.append(f'<text x="{x + 66}" y="138" class="hook" fill="{PIECE}">{HOOKS[i]}</text>')
    title = "Every later call: straight-line Python, no hook, no module call, no parameter fetched"
    parts.append(f'<text x="16" y="182" class="title" fill="{INK}">{title}</text>')
    for i, name in enumerate(CALL):
        x = 16 + i * 108
        fill = PIECE if name.startswith("piece") else OP if name == "attention" else PAPER
        ink = INK if fill == PAPER else "white"
        parts.append(box(x, 196, 88, 44, [name], fill, ink))
        if i < len(CALL) - 1:
            parts.append(arrow(x + 91, 218))
    compiled = "compiled pieces; layers that are alike share one"
    parts.append(f'<text x="124" y="264" class="note" fill="{PIECE}">{compiled}</text>')
    parts.append(f'<text x="430" y="264" class="note" fill="{OP}">splitting ops, run eagerly</text>')
    return "\n".join(parts)


def main() -> None:
    style = "text{font:13px sans-serif;text-anchor:middle}.title{font-size:15px;font-weight:bold;text-anchor:start}"
    style += ".hook{font:11px monospace}.note{font-size:12px;text-anchor:start}"
    background = '<rect width="784" height="280" fill="white"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 784 280"><style>{style}</style>\n{background}\n'
    Path(__file__).with_name("forward.svg").write_text(f"{svg}{drawing()}\n</svg>\n")


if __name__ == "__main__":
    main()
