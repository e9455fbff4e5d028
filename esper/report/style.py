"""Style of a report: light or dark as on the reader's system, from phones to wide screens."""

PALETTE_LIGHT = (
    "#0b63c5", "#c2410c", "#15803d", "#8b2fc9", "#be185d", "#0f766e", "#946000", "#51627a", "#6d4c2f", "#3730a3",
)  # fmt: skip
PALETTE_DARK = (
    "#6cb2ff", "#ff9a5c", "#5fd28a", "#cfa3ff", "#ff8cc0", "#45d0c2", "#e6c04a", "#a8b7cc", "#d2ab86", "#a5a8ff",
)  # fmt: skip
STAGES_LIGHT = {
    "germinated": "#fde68a", "training": "#a9d1ff", "blending": "#ffc48f", "holding": "#d9c2ff",
    "fossilized": "#7fd6a0", "pruned": "#f28b8b", "embargoed": "#d5dae1", "resetting": "#e6e9ee", "other": "#c0c0c0",
}  # fmt: skip
STAGES_DARK = {
    "germinated": "#7a6412", "training": "#1e4f86", "blending": "#8a4a12", "holding": "#573b8a",
    "fossilized": "#1c6b3d", "pruned": "#8f2a2a", "embargoed": "#424b57", "resetting": "#343b45", "other": "#555555",
}  # fmt: skip


def _variables(palette: tuple[str, ...], stages: dict[str, str]) -> str:
    colours = [f"--p{place}:{colour}" for place, colour in enumerate(palette)]
    return ";".join(colours + [f"--s-{name}:{colour}" for name, colour in stages.items()])


BASE = """
*{box-sizing:border-box}
html{font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);overflow-wrap:anywhere}
header,main,footer{max-width:1280px;margin:0 auto;padding:0 16px}
header{padding-top:20px}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 4px}
h2{font-size:1.25rem;margin:36px 0 10px;padding-top:10px;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:0}
section>h3{margin:24px 0 8px}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:12px 0 0}
a{color:var(--p0)}
p{margin:4px 0}
.note,figcaption p,footer{color:var(--quiet);font-size:.9rem}
.figures{display:grid;gap:16px;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));margin:12px 0;
align-items:start}
.lanes{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr));margin:8px 0 16px}
figure{margin:0;padding:12px;background:var(--card);border:1px solid var(--rule);border-radius:8px;min-width:0}
.lanes figure{padding:8px}
.lanes figcaption{font-size:.9rem;font-weight:600}
svg{display:block;width:100%;height:auto}
svg text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;fill:var(--ink)}
svg .label{fill:var(--quiet)}
svg .seed{font-size:12px}
.grid{stroke:var(--rule);stroke-width:1}.zero,.axis,.tick{stroke:var(--quiet);stroke-width:1}
.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}
.dash{stroke-dasharray:6 4}
.band{fill:var(--c);opacity:.16}
.spot{fill:var(--c);opacity:0}.spot:hover{opacity:1}
.dot{fill:var(--c)}
.point{fill:var(--c);opacity:.6}
.diamond{fill:var(--c);stroke:var(--card);stroke-width:1.5}
.whisker{stroke:var(--c);stroke-width:2}
.fill{fill:var(--c)}
.empty{fill:none;stroke:var(--rule)}
.stage{fill:var(--s);stroke:var(--card);stroke-width:1}
.rollback{stroke:var(--p4);stroke-width:2;stroke-dasharray:3 2}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:8px 0;padding:0;font-size:.875rem}
.legend li{display:flex;align-items:center;gap:6px;min-width:0}
.key{flex:none;width:18px;height:0;border-top:3px solid var(--c)}
.key.dash{border-top-style:dashed}
.key.fill{height:12px;border:0;background:var(--c)}
.key.stage{height:14px;border:1px solid var(--rule);background:var(--s)}
.key.point{width:9px;height:9px;border:0;border-radius:50%;background:var(--c)}
.key.diamond{width:9px;height:9px;border:0;background:var(--c);transform:rotate(45deg)}
.scroll{overflow:auto;max-height:70vh;margin:8px 0}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:4px 0}
th,td{padding:4px 12px 4px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule);
overflow-wrap:normal;max-width:28rem}
td{min-width:3.5rem}
th[scope=row]{font-weight:400}
thead th{position:sticky;top:0;background:var(--page);font-weight:600}
figure thead th{background:var(--card)}
td.n{text-align:right}
.facts td{text-align:left;overflow-wrap:anywhere}
.problems+.figures{margin-top:16px}
summary{cursor:pointer;font-size:.9rem;padding:4px 0}
.rounds{display:flex;flex-wrap:wrap;gap:0 24px}
.rounds>details{min-width:10.5rem}.rounds>details[open]{flex:1 0 100%;min-width:0}
.round>summary{font-weight:600}
.problems{border-left:4px solid var(--p1);background:var(--card);padding:8px 12px;margin:8px 0}
.problems ul{margin:4px 0;padding-left:20px}
footer{padding-top:24px;padding-bottom:40px}
:focus-visible{outline:2px solid var(--p0);outline-offset:2px}
@media (max-width:480px){svg text{font-size:14.5px}svg .seed{font-size:13px}figure{padding:8px}}
@media print{details>*{display:block}.scroll{max-height:none}}
"""


def css() -> str:
    """Returns the complete style sheet."""
    light = (
        _variables(PALETTE_LIGHT, STAGES_LIGHT)
        + ";--page:#f6f7f9;--card:#fff;--ink:#15191f;--quiet:#55606e;--rule:#dde1e7"
    )
    dark = (
        _variables(PALETTE_DARK, STAGES_DARK)
        + ";--page:#0f1216;--card:#181c22;--ink:#e9edf2;--quiet:#a3aebb;--rule:#303741"
    )
    classes = "".join(f".c{place}{{--c:var(--p{place})}}" for place in range(len(PALETTE_LIGHT)))
    stages = "".join(f".s-{name}{{--s:var(--s-{name})}}" for name in STAGES_LIGHT)
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"{BASE.strip()}\n{classes}.cb{{--c:var(--quiet)}}{stages}"
    )
