"""The head of the leaderboard's page, beside the style of the reports: a phone's width, and a dark page."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root{color-scheme:light dark;--text:#1d2126;--back:#fff;--soft:#565d66;--line:#d5d9de;--band:#f3f5f7;--link:#005a8c;
--honour:#0b5d45;--honour-back:#dff3ea;--mark:#a33b00}
@media (prefers-color-scheme:dark){:root{--text:#e6e8eb;--back:#15181c;--soft:#a9b1bb;--line:#3a4048;--band:#1f242a;
--link:#7cc4f5;--honour:#8fe3bf;--honour-back:#123428;--mark:#ff9d66}}
*{box-sizing:border-box}
body{color:var(--text);background:var(--back);max-width:80rem;margin:0 auto;padding:1.5rem 1.25rem 4rem;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif;overflow-wrap:anywhere}
h1{font-size:2rem;line-height:1.2;margin:0 0 .75rem}
h2{font-size:1.4rem;line-height:1.25;margin:3rem 0 .25rem;padding-top:1rem;border-top:3px solid var(--text)}
h2+p{margin:.25rem 0 0;color:var(--soft)}
h3{font-size:1.1rem;margin:1.75rem 0 .5rem}
h4{font-size:1rem;margin:1.25rem 0 .25rem}
bdi{display:inline-block;max-width:100%;overflow:hidden;vertical-align:bottom}
.notes{background:var(--band);border-radius:.5rem;padding:.9rem 1.2rem .9rem 2.2rem;margin:0;max-width:56rem}
.notes li+li{margin-top:.35rem}
table{font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{border:0;border-bottom:1px solid var(--line);padding:.45rem .7rem;vertical-align:top}
caption{font-size:1rem;padding:.25rem .7rem}
.ranking{width:100%;margin:.5rem 0 1rem}
.ranking thead th{color:var(--soft);font-weight:600;font-size:.8rem;border-bottom:2px solid var(--line);
vertical-align:bottom}
.ranking tbody th{font-weight:700;min-width:11rem}
.ranking td,.ranking thead th{overflow-wrap:normal}
.ranking .number{text-align:right}.ranking td.number{white-space:nowrap}
.ranking td[data-label="fastest to slowest"]{white-space:normal}
.ranking strong{font-size:1.05rem}
.provisional{background:var(--band)}.provisional th,.provisional td{color:var(--soft)}
.honour{display:inline-block;white-space:nowrap;color:var(--honour);background:var(--honour-back);
border:1px solid currentColor;border-radius:1rem;padding:0 .5rem;font-weight:700}
.spoken{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
details{border:1px solid var(--line);border-radius:.5rem;margin:.5rem 0}
summary{cursor:pointer;padding:.55rem .8rem;font-weight:600;color:var(--link)}
summary bdi{max-width:calc(100% - 3rem)}
summary small{color:var(--soft);font-weight:400}
details[open]>summary{border-bottom:1px solid var(--line)}
details>:not(summary){margin-left:.8rem;margin-right:.8rem}
code{font-size:.9em;background:var(--band);padding:.1em .3em;border-radius:.25rem}
.pair,.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:0 1.5rem;
align-items:start}
.scroll{overflow-x:auto}.scroll table{width:100%;margin:.5rem 0}.scroll th{font-weight:600}
.laps tr>*{overflow-wrap:normal;padding:.45rem .4rem}.laps td:nth-child(2){white-space:nowrap}
.laps td:nth-child(3),.laps td:nth-child(4){min-width:4.2rem}
.laps th[scope=row]{overflow-wrap:anywhere;min-width:7rem;font-weight:400}
figure{margin:.5rem 0}figcaption{color:var(--soft);font-size:.9rem}
svg{display:block;width:100%;height:auto}
svg text{font-size:11px;fill:var(--soft);font-family:inherit}
.grid{stroke:var(--line);stroke-width:1}.mark{stroke:var(--mark);stroke-width:1.5;stroke-dasharray:6 4}
.line{fill:none!important;stroke-width:2.2;stroke-linejoin:round}.other{fill:none;stroke:var(--soft);stroke-width:1;opacity:.6}
circle{stroke:none}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1rem;list-style:none;padding:0 0 0 2.6rem;margin:0;font-size:.85rem}
.legend li{display:flex;align-items:center;gap:.4rem}.legend .key{width:28px;flex:none}
pre{background:var(--band);border-radius:.5rem;max-height:26rem;overflow-wrap:normal}
.code pre>span{width:max-content;min-width:100%;padding:0 .2rem}
@media (max-width:60rem){
.laps table{font-size:.8rem}.laps tr>*{padding:.4rem .25rem}
.laps td:nth-child(3){min-width:3.4rem}.laps td:nth-child(4){min-width:0}
.ranking thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.ranking,.ranking tbody{display:block}
.ranking tr{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.5rem,1fr));gap:.5rem 1rem;position:relative;
border:1px solid var(--line);border-radius:.5rem;padding:.7rem .9rem;margin:.6rem 0}
.ranking th,.ranking td{display:block;border:0;padding:0}.ranking .number{text-align:left}
.ranking tbody th{grid-column:1/-1;grid-row:1;font-size:1.1rem;padding-right:5rem}
.ranking td::before{content:attr(data-label);display:block;color:var(--soft);font-size:.8rem}
.ranking td[data-label=place]{position:absolute;right:.9rem;top:.7rem;font-size:1.1rem;font-weight:700}
.ranking td[data-label=place]::before{display:inline;content:"place ";font-weight:400}
}
@media (prefers-color-scheme:dark){
.code span[style*="#D3E8F8"]{background:#0f3a55!important;color:#d6ecfb!important}
.code span[style*="#FBE3C4"]{background:#4d3210!important;color:#fbe3c4!important}}
@media print{h2{break-before:auto}.code pre{max-height:none}}
""".replace("\n", "")
HEAD = (
    f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
    f'<meta name="color-scheme" content="light dark"><style>{STYLE}</style>'
)
