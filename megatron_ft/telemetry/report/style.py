"""Style sheet of the page for light and dark mode. It loads no other files."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --panel: #f6f7f9; --ink: #1c2430; --soft: #5a6675; --line: #d5dae1; --grid: #e7eaee;
  --loss: #0072b2; --evaluation: #7b3294; --bad: #b3261e; --good: #1b7a4b; --open: #8a5a00;
  --trains: #a9bdd3; --unfinished: #ffffff; --forms: #e9e2f5; --starts: #e9e2f5; --loads: #c9b8e8;
  --useful: #3d9a6a; --stalled: #c9a227; --again: #e8833a; --skipped: #9467bd; --recovering: #c0443c;
  --between: #8c99a8; --rest: #ccd3db;
  --load-0: #2166ac; --load-1: #67a9cf; --load-2: #c6dcec; --load-3: #f1f1ef; --load-4: #fbceb1; --load-5: #ea8560;
  --load-6: #b2182b; --held-1: #4a7fb0; --held-2: #173f66;
  --replays: #e8833a; --receives: #56ad6a; --serves: #4aa3d6; --waits: #ffffff; --other: #d9d9d9; --bar: #10151c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #11161d; --panel: #1a212b; --ink: #e4e9f0; --soft: #9aa7b6; --line: #36414f; --grid: #232c38;
    --loss: #5cb3ec; --evaluation: #d19be0; --bad: #ff8a80; --good: #6fd3a0; --open: #f0bf66;
    --trains: #44607f; --unfinished: #11161d; --forms: #2d2740; --starts: #2d2740; --loads: #5b4a86;
    --useful: #3a8f63; --stalled: #a8851a; --again: #c06a25; --skipped: #8259a8; --recovering: #c24d45;
    --between: #6b7888; --rest: #3f4a58;
    --load-0: #4c9be8; --load-1: #33689c; --load-2: #243f58; --load-3: #2b313a; --load-4: #5d3b2a; --load-5: #a9573a;
    --load-6: #ee7262; --held-1: #4a7fb0; --held-2: #a9d2f7;
    --replays: #a84f10; --receives: #2c7a3f; --serves: #1f77ad; --waits: #11161d; --other: #4a4a4a; --bar: #f2f5f9;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1.25rem 3rem; max-width: 1080px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif;
}
h1, h2, h3, p, td, th, li, dd, summary { unicode-bidi: isolate; overflow-wrap: break-word; }
.words { overflow-wrap: anywhere; min-width: 10rem; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.25; }
h2 { margin: 2.2rem 0 .6rem; font-size: 1.2rem; }
h3 { margin: 0; font-size: 1.02rem; display: inline; }
p { margin: .35rem 0; }
a { color: var(--loss); }
.about, .soft, footer { color: var(--soft); }
.outcome { display: inline-block; margin: .7rem 0 0; padding: .25rem .75rem; border-radius: .4rem; border: 1px solid; }
.good { color: var(--good); } .bad { color: var(--bad); } .open { color: var(--open); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: .7rem; margin: 1rem 0; }
.tiles div { padding: .6rem .8rem; border-radius: .5rem; background: var(--panel); }
.tiles dt { color: var(--soft); font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.1rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.plot { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 640px; height: auto; }
svg text { font-size: 12px; font-family: inherit; fill: var(--ink); }
svg .tick, svg .label, svg .side { fill: var(--soft); }
svg .strong { font-weight: 600; }
svg .inbar { font-size: 11px; fill: var(--bar); }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); } .edge { stroke: var(--line); stroke-dasharray: 2 4; }
.moment { stroke: var(--soft); stroke-dasharray: 3 3; }
.failed-moment { stroke: var(--bad); stroke-width: 1.5; }
.curve { fill: none; stroke: var(--loss); stroke-width: 1.8; stroke-linejoin: round; }
.dot { fill: var(--loss); } .evaluation { fill: var(--evaluation); }
.failure { fill: none; stroke: var(--bad); stroke-width: 2.2; stroke-linecap: round; }
.recovery { stroke: var(--bad); stroke-dasharray: 4 3; }
.change { stroke: var(--soft); stroke-width: 1.4; stroke-dasharray: 1.5 3; }
.badge { fill: var(--paper); stroke: var(--soft); }
.lane { fill: var(--panel); }
.trains { fill: var(--trains); } .loads { fill: var(--loads); } .replays { fill: var(--replays); }
.receives { fill: var(--receives); }
.serves { fill: var(--serves); } .other { fill: var(--other); } .forms, .starts { fill: var(--forms); }
.waits, .unfinished { fill: var(--waits); stroke: var(--soft); stroke-dasharray: 3 2; }
.useful { fill: var(--useful); } .stalled { fill: var(--stalled); } .again { fill: var(--again); }
.skipped { fill: var(--skipped); } .recovering { fill: var(--recovering); } .between { fill: var(--between); }
.load-0 { fill: var(--load-0); } .load-1 { fill: var(--load-1); } .load-2 { fill: var(--load-2); }
.load-3 { fill: var(--load-3); } .load-4 { fill: var(--load-4); } .load-5 { fill: var(--load-5); }
.load-6 { fill: var(--load-6); } .held-1 { fill: var(--held-1); } .held-2 { fill: var(--held-2); }
.rest { fill: var(--rest); }
.log { fill: var(--serves); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .5rem 0; padding: 0; list-style: none; }
.legend li { font-size: .87rem; }
.legend svg { display: inline-block; width: 22px; min-width: 0; height: 12px; }
.legend svg { margin-right: .4rem; vertical-align: -1px; }
.table { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .9rem; }
.few { width: auto; min-width: 20rem; }
caption { padding: .2rem 0; text-align: left; color: var(--soft); }
th, td { padding: .32rem .5rem; border-bottom: 1px solid var(--grid); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
th.number { white-space: normal; }
details { margin: .6rem 0; }
details.recovery-details { padding: .75rem 1rem; border: 1px solid var(--line); border-radius: .6rem; }
summary { cursor: pointer; }
summary:focus-visible, a:focus-visible { outline: 2px solid var(--loss); outline-offset: 2px; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: .8rem; font-size: .87rem; }
@media print { details { break-inside: avoid; } }
"""
"""Style sheet of the page. It contains no character that must be escaped in HTML."""
