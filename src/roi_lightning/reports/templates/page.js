"use strict";
for (const figure of document.querySelectorAll("[data-chart]")) {
  const chart = JSON.parse(document.getElementById("chart-data").textContent)[figure.dataset.chart];
  const svg = figure.querySelector("svg");
  const readout = figure.querySelector(".readout");
  const steps = [...new Set(chart.lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const scale = ([low, high, from, to], value, log) => {
    const [a, b, v] = log ? [Math.log(low), Math.log(high), Math.log(value)] : [low, high, value];
    return from + ((v - a) / (b - a)) * (to - from);
  };
  const draw = (kind, name, attributes) => {
    const element = document.createElementNS(svg.namespaceURI, kind);
    element.setAttribute("class", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    svg.append(element);
  };
  const clear = () => {
    readout.hidden = true;
    for (const element of svg.querySelectorAll(".guide, .dot")) element.remove();
  };
  let current = steps.length - 1;
  const show = (index) => {
    current = Math.max(0, Math.min(steps.length - 1, index));
    clear();
    const step = steps[current];
    const x = scale(chart.x, step, false);
    draw("line", "guide", { x1: x, x2: x, y1: chart.y[2], y2: chart.y[3] });
    const words = ["step " + step.toLocaleString("en")];
    for (const line of chart.lines) {
      let at = line.steps.findLastIndex((one) => one <= step);
      if (at < 0) continue;
      const value = line.values[at];
      words.push((line.label ? line.label + ": " : "") + value);
      if (typeof value === "number") {
        const style = "fill: var(--line-" + line.number + ")";
        draw("circle", "dot", { cx: scale(chart.x, line.steps[at], false), cy: scale(chart.y, value, chart.log), r: 4, style });
      }
    }
    readout.textContent = words.join("\n");
    readout.hidden = false;
    readout.style.left = x > 180 ? "0" : "auto";
    readout.style.right = x > 180 ? "auto" : "0";
    readout.style.marginLeft = "14%";
  };
  const pointed = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 360;
    const [low, high, from, to] = chart.x;
    const step = low + ((x - from) / (to - from)) * (high - low);
    const nearest = steps.reduce((best, one, i) => (Math.abs(one - step) < Math.abs(steps[best] - step) ? i : best), 0);
    show(nearest);
  };
  svg.addEventListener("pointermove", pointed);
  svg.addEventListener("pointerdown", pointed);
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && clear());
  figure.addEventListener("blur", clear);
  figure.addEventListener("keydown", (event) => {
    if (event.target !== figure) return;
    const moves = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: steps.length - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(readout.hidden ? current : moves[event.key]);
  });
}
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("main > section > details")) details.open = true;
});
