// The parts of the timeline other than events: rows, colours, and the format of times.

const HEIGHTS = { heading: 22, ranges: 18, ops: 15, api: 13, os: 13, gpu: 22 };
const GAP = 3; // after the lanes of a thread or stream
export const UNITS = [
  ["s", 1e9],
  ["ms", 1e6],
  ["µs", 1e3],
  ["ns", 1],
];

/** "1.24 ms": a duration with three digits. */
export function duration(ns) {
  const [unit, size] = UNITS.find(([, size]) => Math.abs(ns) >= size) ?? UNITS[3];
  const value = ns / size;
  const digits = size === 1 ? 0 : Math.max(2 - Math.floor(Math.log10(Math.abs(value))), 0);
  return `${value.toFixed(Math.min(digits, 2))} ${unit}`;
}

/** A time from the zero in milliseconds, with all known digits. */
export function moment(ns) {
  return `${(ns / 1e6).toLocaleString("en", { minimumFractionDigits: 3, maximumFractionDigits: 6 })} ms`;
}

/** Rows from top to bottom, headings and lanes, each with its `y` and `height`; and the total height. */
export function layOut(scene) {
  const rows = [];
  let y = 0;
  let before = {};
  const add = (row, height) => {
    rows.push({ ...row, y, height });
    y += height;
  };
  for (const strip of scene.strips) {
    const other = strip.trace !== before.trace;
    const trace = scene.names.length > 1 && other ? scene.names[strip.trace] : "";
    if (other || strip.process !== before.process) add({ heading: strip.process, trace }, HEIGHTS.heading);
    for (let level = 0; level < strip.lanes; level++) {
      add({ lane: strip.first + level, strip, text: level ? "" : strip.label }, HEIGHTS[strip.kind]);
    }
    y += GAP;
    before = strip;
  }
  return { rows, height: y + 4, ofLane: new Map(rows.filter((row) => "lane" in row).map((row) => [row.lane, row])) };
}

/** Colours of the page's theme, and of the shades. */
export class Inks {
  constructor(root, scene) {
    const style = getComputedStyle(root);
    const read = (name) => style.getPropertyValue(`--lkt-${name}`).trim();
    for (const name of ["paper", "lane", "band", "line", "ink", "soft", "accent"]) this[name] = read(name);
    this.shades = scene.shades.map(({ name, color, themed }) => (themed && read(name)) || color);
    this.rgb = this.shades.map((color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)));
    this.texts = this.rgb.map(([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b > 150 ? "#1f2933" : "#ffffff"));
    this.version = Inks.made = (Inks.made ?? 0) + 1;
  }
}
