"""Opens a page in a real browser and looks at it as people do: on a wide screen, on a phone, in the dark."""

import re

from tests.support.browser import Browser
from tests.support.processes import wait_for

DESKTOP, PHONE, HEIGHT = 1300, 390, 900
TEXT_CONTRAST, CURVE_CONTRAST = 4.5, 3.0
"""WCAG 2.1, 1.4.3 and 1.4.11: a text, and what has to be told apart otherwise, against the background."""
READ = """[...document.querySelectorAll("figure[data-chart]")].map((figure) => {
  const svg = figure.querySelector("svg"), output = figure.querySelector("output");
  const press = (key) => svg.dispatchEvent(new KeyboardEvent("keydown", { key }));
  svg.dispatchEvent(new Event("focus"));
  press("Home");
  const first = output.textContent;
  press("ArrowRight");
  const second = output.textContent, box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right, clientY: box.top + 5 }));
  const last = output.textContent, shapes = [...svg.querySelectorAll("path, circle")];
  svg.dispatchEvent(new Event("blur"));
  return { name: figure.dataset.chart, first, second, last, drawn: shapes.some((each) => each.getTotalLength() > 0) };
})"""
LAYOUT = """({
  width: innerWidth, content: document.documentElement.scrollWidth,
  wide: [...document.querySelectorAll("body *")]
    .filter((each) => !each.closest(".scroll, pre") && each.getBoundingClientRect().right > innerWidth + 1)
    .map((each) => each.tagName),
  boxes: [...document.querySelectorAll("figure[data-chart] svg")]
    .map((each) => each.getBoundingClientRect())
    .map((box) => [Math.round(box.left), Math.round(box.width), box.height / box.width]),
})"""
COLOURS = """(() => {
  const NUMBERS = "svg text[class^='in-']", CURVES = "figure[data-chart] path:not(.band), svg circle.spike";
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (each) => {
    if (each.matches(NUMBERS)) {
      const box = `path.box.${each.getAttribute("class").slice(-1)}`;
      return parts(getComputedStyle(each.closest("svg").querySelector(box)).fill);
    }
    for (; each; each = each.parentElement) {
      const colour = parts(getComputedStyle(each).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour.slice(0, 3);
    }
    return null;
  };
  const seen = (each) => each.checkVisibility() && !each.closest("caption");
  const all = [...document.querySelectorAll("body *")].filter(seen);
  const texts = all.filter((each) => !each.matches("svg > title, desc, script") &&
    [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  const curves = all.filter((each) => each.matches(CURVES));
  const found = (name, each, ink) => [name, each.outerHTML.slice(0, 80), parts(ink), behind(each)];
  return [
    ...texts.map((each) => {
      const style = getComputedStyle(each);
      return found("text", each, each.matches("svg text") ? style.fill : style.color);
    }),
    ...curves.map((each) => found("curve", each, getComputedStyle(each).stroke)),
  ];
})()"""
BODY = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"


def opened(folder, page):
    """Opens a page with charts, checks what has to be true of each, and returns what each chart says."""
    path = folder / "opened.html"
    path.write_text(page)
    with Browser(folder / "profile") as browser:
        browser.resize(DESKTOP, HEIGHT)
        browser.call("Page.navigate", url=f"file://{path}")
        wait_for(lambda: browser.evaluate("!!window.startCharts && document.readyState == 'complete'"), "the page")
        browser.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        charts = read_charts(browser)
        check_sizes(browser, charts)
        check_colours(browser)
        assert browser.errors() == []
    return charts


def read_charts(browser):
    """What each chart says at its first, its second and its last step; all have data."""
    charts = {chart["name"]: chart for chart in browser.evaluate(READ)}
    assert charts
    for name, chart in charts.items():
        assert chart["drawn"], name
        for said in (chart["first"], chart["last"]):
            assert re.match(r"step [\d,.e+]+: .*\d", said), (name, said)
            assert not re.search("NaN|undefined|Infinity", said), (name, said)
    return charts


def check_sizes(browser, charts):
    """The charts follow the window to a phone's width and back, and nothing is wider than it."""
    found = []
    for width in (DESKTOP, PHONE, DESKTOP):
        browser.resize(width, HEIGHT)
        layout = browser.evaluate(LAYOUT)
        assert layout["width"] == width and layout["content"] <= width and layout["wide"] == [], layout
        assert all(0 <= left < left + chart_width <= width for left, chart_width, _ in layout["boxes"]), layout
        assert {round(ratio, 2) for _, _, ratio in layout["boxes"]} == {0.55}, "a chart is distorted"
        assert read_charts(browser) == charts  # the pointer finds the steps at every size
        found.append(layout["boxes"])
    wide, narrow, again = found
    assert again == wide and len({left for left, _, _ in narrow}) == 1
    assert len({left for left, _, _ in wide}) == min(3, len(wide))
    assert all(chart_width > 0.8 * PHONE for _, chart_width, _ in narrow)


def check_colours(browser):
    """The page follows the system's light and dark mode, and is legible in both."""
    bodies = []
    for scheme in ("light", "dark"):
        browser.emulate_colours(scheme)
        bodies.append(browser.evaluate(BODY))
        colours = browser.evaluate(COLOURS)
        assert {kind for kind, *_ in colours} == {"text", "curve"}
        for kind, element, ink, ground in colours:
            least = TEXT_CONTRAST if kind == "text" else CURVE_CONTRAST
            assert contrast(ink, ground) >= least, (scheme, element, ink, ground, contrast(ink, ground))
    (light_ground, light_ink), (dark_ground, dark_ink) = bodies
    assert luminance(numbers(light_ground)) > 0.8 > 0.2 > luminance(numbers(dark_ground)), bodies
    assert luminance(numbers(light_ink)) < 0.2 < 0.8 < luminance(numbers(dark_ink)), bodies


def numbers(colour):
    return [float(part) for part in re.findall(r"[\d.]+", colour)]


def luminance(colour):
    """The relative luminance of an sRGB colour (WCAG 2.1)."""
    shares = [part / 255 for part in colour[:3]]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(ink, ground):
    low, high = sorted((luminance(ink), luminance(ground)))
    return (high + 0.05) / (low + 0.05)
