// The frame around the events: bands and names of the lanes, and the time axis.

import { UNITS, layOut, moment } from "./timeline_scene.js";

export const OVERVIEW = 16; // pixels
export const HEAD = 42; // overview and axis
const DECIMALS = 3; // of the time at a tick
export const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
const BOLD = FONT.replace("11px", "600 12px");

export class Frame {
  constructor(canvas, scene, store) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.scene = scene;
    this.store = store;
    this.layout = layOut(scene);
    this.widths = new Map();
  }

  resize(width, height) {
    const ratio = window.devicePixelRatio || 1;
    this.width = width;
    this.height = height;
    this.ratio = ratio;
    this.gutter = Math.min(width < 620 ? 96 : 176, Math.floor(width / 2)); // leaves room for the time axis
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
  }

  /** The top of a row of the layout. */
  top(row, view) {
    return row.y + HEAD - view.top;
  }

  clipped(x, y, width, height, draw) {
    const c = this.context;
    c.save();
    c.beginPath();
    c.rect(x, y, width, height);
    c.clip();
    draw();
    c.restore();
  }

  paintRows(rows, ticks, view, inks) {
    const c = this.context;
    for (const row of rows) {
      if (row.heading) continue;
      c.fillStyle = row.lane === view.lane ? inks.band : inks.lane;
      c.fillRect(this.gutter, row.y, this.width, row.height - 1);
    }
    c.fillStyle = inks.line;
    for (const { x } of ticks) c.fillRect(x, HEAD, 1, this.height);
  }

  /** `text`, or the part of it that fits: the end of a path, else the beginning; "" if too little fits. */
  fit(text, room) {
    if (room < 16) return "";
    if (this.measure(text) <= room) return text;
    const parts = text.split("/");
    for (let from = 1; from < parts.length; from++) {
      const tail = parts.slice(from).join("/");
      if (this.measure(tail) <= room) return tail;
    }
    const last = parts[parts.length - 1];
    let kept = Math.floor((room - 8) / 5.5);
    while (kept > 2 && this.measure(`${last.slice(0, kept)}…`) > room) kept--;
    return kept > 2 ? `${last.slice(0, kept)}…` : "";
  }

  measure(text) {
    let width = this.widths.get(text);
    if (width === undefined) {
      if (this.widths.size > 20000) this.widths.clear();
      this.widths.set(text, (width = this.context.measureText(text).width));
    }
    return width;
  }

  paintHeadings(rows, view, inks) {
    const c = this.context;
    const { gutter, width } = this;
    c.fillStyle = inks.paper;
    c.fillRect(0, HEAD, gutter, this.height);
    c.fillStyle = inks.line;
    c.fillRect(gutter - 1, HEAD, 1, this.height);
    for (const row of rows) {
      const middle = row.y + row.height / 2;
      if (row.heading) {
        c.fillStyle = inks.band;
        c.fillRect(0, row.y, width, row.height - 2);
        c.font = BOLD;
        c.fillStyle = inks.accent;
        c.fillText(row.trace, 8, middle);
        const from = row.trace ? 20 + c.measureText(row.trace).width : 8;
        c.font = FONT;
        c.fillStyle = inks.ink;
        c.fillText(row.heading, from, middle);
      } else if (row.text) {
        c.fillStyle = row.lane === view.lane ? inks.ink : inks.soft;
        c.fillText(this.fit(row.text, gutter - 22), 14, row.y + Math.max(row.height, 14) / 2);
      }
      if (row.lane === view.lane && view.focused) {
        c.fillStyle = inks.accent;
        c.fillRect(0, row.y, 3, row.height - 1);
      }
    }
  }

  ticks({ begin, perPixel }) {
    const least = perPixel * 110;
    const power = 10 ** Math.floor(Math.log10(least));
    const step = Math.max([1, 2, 5, 10].find((factor) => factor * power >= least) * power, 1);
    const end = begin + (this.width - this.gutter) * perPixel;
    const written = (largest) => {
      const [unit, size] = UNITS.find(([, size]) => largest >= 2 * size) ?? UNITS[3];
      return { unit, size, decimals: Math.max(Math.round(Math.log10(size)) - Math.floor(Math.log10(step) + 1e-9), 0) };
    };
    let form = written(Math.max(Math.abs(begin), Math.abs(end)));
    this.base = 0; // zero of the ticks, if they are so close that full times would have too many digits
    if (form.decimals > DECIMALS) {
      const apart = 10 ** Math.ceil(Math.log10(end - begin));
      this.base = Math.floor(begin / apart) * apart;
      form = written(end - this.base);
    }
    const ticks = [];
    for (let at = Math.ceil(begin / step); at * step <= end; at++) {
      const value = ((at * step - this.base) / form.size || 0).toLocaleString("en", {
        minimumFractionDigits: form.decimals,
        maximumFractionDigits: form.decimals,
      });
      ticks.push({ x: Math.round(this.x(at * step)), text: `${this.base ? "+" : ""}${value} ${form.unit}` });
    }
    return ticks;
  }

  paintAxis(ticks, view, inks) {
    const c = this.context;
    c.fillStyle = inks.paper;
    c.fillRect(0, OVERVIEW, this.width, HEAD - OVERVIEW);
    c.fillStyle = inks.soft;
    c.textAlign = "center";
    for (const { x, text } of ticks) {
      const half = this.measure(text) / 2;
      c.fillRect(x, HEAD - 5, 1, 5);
      if (x + half < this.width - 4) c.fillText(text, Math.max(x, this.gutter + half), HEAD - 14);
    }
    c.textAlign = "left";
    c.fillText(this.fit(this.base ? moment(this.base) : this.scene.zero, this.gutter - 16), 8, HEAD - 14);
    c.fillStyle = inks.line;
    c.fillRect(0, HEAD - 1, this.width, 1);
  }

  paintScroll(view, inks) {
    const room = this.height - HEAD;
    if (this.layout.height <= room) return;
    const c = this.context;
    c.fillStyle = inks.soft;
    c.globalAlpha = 0.5;
    c.fillRect(this.width - 5, HEAD + (view.top / this.layout.height) * room, 4, (room / this.layout.height) * room);
    c.globalAlpha = 1;
  }
}
