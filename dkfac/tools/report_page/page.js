"use strict";
// Under the pointer: what the lines of a chart are there. All text is set as text, never as HTML.
addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });

const NUM_SHOWN = 9;
const reading = document.createElement("div");
reading.id = "reading";
reading.hidden = true;
document.body.append(reading);

function scaleOf(words) {
  const [low, high, begin, end, form] = words.split(" ");
  const map = form === "log" ? Math.log10 : Number, back = form === "log" ? (v) => 10 ** v : (v) => v;
  const first = map(low), last = map(high);
  return (at) => back(first + (last - first) * (at - begin) / (end - begin));
}

function pointsOf(path) {
  if (!path.points) {
    path.points = [...path.getAttribute("d").matchAll(/[ML]([-\d.]+) ([-\d.]+)/g)].map((m) => [+m[1], +m[2]]);
  }
  return path.points;
}

function nearest(points, at) {
  return points.reduce((best, point) => (Math.abs(point[0] - at) <= Math.abs(best[0] - at) ? point : best));
}

function say(value) {
  return Number(value.toPrecision(4)).toString();
}

function row(text, colour) {
  const line = document.createElement("div");
  if (colour) {
    const chip = document.createElement("i");
    chip.style.background = colour;
    line.append(chip);
  }
  line.append(text);
  return line;
}

function read(svg, event) {
  const box = svg.getBoundingClientRect();
  const at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
  const x = scaleOf(svg.dataset.x), y = scaleOf(svg.dataset.y);
  const lines = [...svg.querySelectorAll("path")].filter((path) => pointsOf(path).length);
  if (!lines.length) return;
  const where = nearest(lines.flatMap((path) => [nearest(path.points, at)]), at)[0];
  const rows = lines.slice(0, NUM_SHOWN).map((path) => {
    return row(`${path.dataset.label}: ${say(y(nearest(path.points, at)[1]))}`, path.style.stroke);
  });
  const left = lines.length - rows.length;
  reading.replaceChildren(row(`${svg.dataset.unit}: ${say(x(where))}`), ...rows, ...(left ? [row(`and ${left} more`)] : []));
  reading.hidden = false;
  const wide = reading.offsetWidth, high = reading.offsetHeight;
  reading.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - wide - 4))}px`;
  reading.style.top = `${event.clientY + high + 24 > innerHeight ? event.clientY - high - 12 : event.clientY + 16}px`;
}

for (const svg of document.querySelectorAll("svg.lines")) {
  svg.addEventListener("pointermove", (event) => read(svg, event));
  svg.addEventListener("pointerdown", (event) => read(svg, event));
  svg.addEventListener("pointerleave", () => { reading.hidden = true; });
}
addEventListener("scroll", () => { reading.hidden = true; }, { passive: true });
document.documentElement.dataset.ready = "yes";
