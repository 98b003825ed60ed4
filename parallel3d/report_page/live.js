"use strict";
(() => {
  let version = document.body.dataset.version;
  const waitMs = 2000;
  const update = async () => {
    const newest = await (await fetch("/version")).text();
    if (newest === version) return;
    const page = new DOMParser().parseFromString(await (await fetch("/")).text(), "text/html");
    if (!page.getElementById("data") || !document.getElementById("data")) return void location.reload();
    const opened = [...document.querySelectorAll("details[open] > summary")].map((each) => each.textContent);
    const at = [scrollX, scrollY];
    const focused = document.activeElement?.closest?.("figure[data-chart]")?.dataset.chart;
    for (const name of ["header", "main", "footer", "#data"]) {
      document.querySelector(name).replaceWith(document.adoptNode(page.querySelector(name)));
    }
    for (const summary of document.querySelectorAll("details > summary")) {
      summary.parentElement.open = opened.includes(summary.textContent);
    }
    document.title = page.title;
    window.startCharts();
    if (focused) document.querySelector(`figure[data-chart="${CSS.escape(focused)}"] svg`)?.focus({ preventScroll: true });
    scrollTo(...at);
    version = page.body.dataset.version;
  };
  const follow = () => update().catch(() => {}).then(() => setTimeout(follow, waitMs));
  setTimeout(follow, waitMs);
})();
