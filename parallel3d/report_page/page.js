"use strict";
window.startCharts = () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [left, right, , , width] = data.frame;
  const format = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e7 || size < 1e-3)) return value.toExponential(3);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(5)));
  };
  const nearest = (xs, x) => xs.reduce((best, each, at) => (Math.abs(each - x) < Math.abs(xs[best] - x) ? at : best), 0);
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = data.charts.find((each) => each.name === figure.dataset.chart);
    const svg = figure.querySelector("svg"), cross = svg.querySelector(".cross");
    const output = figure.querySelector("output");
    const longest = chart.series.reduce((a, b) => (b.curve.x.length > a.curve.x.length ? b : a));
    let place = longest.curve.x.length - 1;
    const show = (x) => {
      const at = left + ((right - left) * (x - chart.x[0])) / (chart.x[1] - chart.x[0] || 1);
      cross.setAttribute("x1", at);
      cross.setAttribute("x2", at);
      cross.setAttribute("visibility", "visible");
      const said = chart.series.map((series) => {
        const curve = series.curve, stairs = ["stairs", "planned"].includes(series.kind);
        let number = nearest(curve.x, x);
        if (stairs && curve.x[number] > x && number > 0) number -= 1;
        const low = curve.low[number], high = curve.high[number];
        const error = series.errors[number] ?? null;
        let band = low === high ? "" : ` (${format(low)} to ${format(high)})`;
        if (series.kind === "errors") band = error === null ? "" : ` \u00b1 ${format(error)}`;
        const elsewhere = stairs || curve.x[number] === x ? "" : ` at step ${format(curve.x[number])}`;
        const label = chart.series.length > 1 ? `${series.label} ` : "";
        return `${label}${format(curve.mean[number])}${band}${elsewhere}`;
      });
      output.textContent = `step ${format(x)}: ${said.join("; ")}`;
    };
    const hide = () => {
      cross.setAttribute("visibility", "hidden");
      output.textContent = "\u00a0";
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const share = (((event.clientX - box.left) / box.width) * width - left) / (right - left);
      place = nearest(longest.curve.x, chart.x[0] + share * (chart.x[1] - chart.x[0]));
      show(longest.curve.x[place]);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("focus", () => show(longest.curve.x[place]));
    svg.addEventListener("keydown", (event) => {
      const last = longest.curve.x.length - 1;
      const moves = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: last };
      if (!(event.key in moves)) return;
      event.preventDefault();
      place = Math.min(last, Math.max(0, moves[event.key]));
      show(longest.curve.x[place]);
    });
  }
};
window.startCharts();
