// The events of a view, drawn from the tiles that the page has, and an overview of the whole time.

import { FONT, Frame, HEAD, OVERVIEW } from "./timeline_frame.js";

const FADED = 0.16; // opacity of events that are not emphasised
const DENSEST = 0.8; // opacity of columns full of short events, to tell them from bars

export class Painter extends Frame {
  /** Draws `view` (begin, perPixel, top, selected, lane, emphasised); returns whether all tiles were there. */
  paint(view, inks) {
    const { context: c, width, height, gutter, ratio } = this;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.fillStyle = inks.paper;
    c.fillRect(0, 0, width, height);
    c.font = FONT;
    c.textBaseline = "middle";
    this.x = (ns) => gutter + (ns - view.begin) / view.perPixel;
    const ticks = this.ticks(view);
    const rows = this.layout.rows
      .map((row) => ({ ...row, y: this.top(row, view) }))
      .filter((row) => row.y < height && row.y + row.height > HEAD);
    this.clipped(0, HEAD, width, height - HEAD, () => this.paintRows(rows, ticks, view, inks));
    let whole = true;
    this.clipped(gutter, HEAD, width - gutter, height - HEAD, () => {
      whole = this.paintTiles(rows, view, inks);
      this.paintChosen(view, inks);
    });
    this.clipped(0, HEAD, width, height - HEAD, () => this.paintHeadings(rows, view, inks));
    this.paintAxis(ticks, view, inks);
    this.paintOverview(view, inks);
    this.paintScroll(view, inks);
    return whole;
  }

  paintTiles(rows, view, inks) {
    const { store, gutter, width } = this;
    const level = store.levelFor(view.perPixel);
    const end = view.begin + (width - gutter) * view.perPixel;
    const places = new Map(rows.filter((row) => !row.heading).map((row) => [row.lane, row]));
    const labels = new Map();
    let whole = true;
    this.shown = [];
    for (const index of store.between(level, view.begin, end)) {
      const tile = store.nearest(level, index);
      whole &&= tile?.level === level;
      if (!tile) continue;
      const from = this.scene.origin + index * store.tileNs(level);
      const left = Math.max(this.x(from), gutter);
      const right = Math.min(this.x(from + store.tileNs(level)), width);
      this.shown.push({ tile, left, right });
      const draw = () => {
        this.paintColumns(tile, places, left, right, view, inks);
        this.paintEvents(tile, places, left, right, view, inks, labels);
      };
      if (tile.level === level) draw();
      else this.clipped(left, HEAD, right - left, this.height, draw);
    }
    this.paintLabels(labels, view, inks);
    return whole;
  }

  paintColumns(tile, places, left, right, view, inks) {
    const c = this.context;
    const { store, scene } = this;
    const image = this.image(tile, view, inks);
    if (!image) return;
    const columnNs = store.columnNs(tile.level);
    const first = scene.origin + tile.index * store.tileNs(tile.level);
    const from = Math.max(Math.floor((view.begin + (left - this.gutter) * view.perPixel - first) / columnNs), 0);
    const to = Math.min(
      Math.ceil((view.begin + (right - this.gutter) * view.perPixel - first) / columnNs),
      scene.columns,
    );
    if (to <= from) return;
    const x = this.x(first + from * columnNs);
    const wide = ((to - from) * columnNs) / view.perPixel;
    c.imageSmoothingEnabled = columnNs <= view.perPixel;
    tile.rows.forEach((lane, at) => {
      const row = places.get(lane);
      if (row) c.drawImage(image, from, 3 * at + 1, to - from, 1, x, row.y + 2, wide, row.height - 5);
    });
  }

  /** The columns of a tile as an image; each lane has three rows of pixels, so that scaling mixes it with no other. */
  image(tile, view, inks) {
    const version = `${inks.version} ${[...view.emphasised]}`;
    if (tile.inks === version || !tile.rows.length) return tile.image;
    const { columns } = this.scene;
    const pixels = new ImageData(columns, 3 * tile.rows.length);
    const words = new Uint32Array(pixels.data.buffer);
    const colors = inks.rgb.map(([r, g, b]) => (b << 16) | (g << 8) | r);
    const strength = inks.rgb.map((_, shade) => (this.faded(view, shade) ? FADED : 1));
    for (let at = 0; at < tile.columnFill.length; at++) {
      const shade = tile.columnShade[at];
      const to = at + 2 * columns * Math.floor(at / columns);
      words[to] =
        words[to + columns] =
        words[to + 2 * columns] =
          ((tile.columnFill[at] * DENSEST * strength[shade]) << 24) | colors[shade];
    }
    tile.image ??= new OffscreenCanvas(pixels.width, pixels.height);
    tile.image.getContext("2d").putImageData(pixels, 0, 0);
    tile.inks = version;
    return tile.image;
  }

  faded(view, shade) {
    return view.emphasised.size > 0 && !view.emphasised.has(shade);
  }

  paintEvents(tile, places, left, right, view, inks, labels) {
    const c = this.context;
    const { ratio } = this;
    const gaps = []; // so that neighbours never look like one bar
    let shade = -1;
    for (let at = 0; at < tile.start.length; at++) {
      const row = places.get(tile.lane[at]);
      if (!row) continue;
      const ends = this.x(tile.end[at]);
      const x0 = Math.max(this.x(tile.start[at]), left);
      const x1 = Math.min(ends, right);
      if (x1 <= x0) continue;
      if (tile.shade[at] !== shade) {
        shade = tile.shade[at];
        c.fillStyle = inks.shades[shade];
        c.globalAlpha = this.faded(view, shade) ? FADED : 1;
      }
      const begin = Math.round(x0 * ratio) / ratio;
      const end = Math.round(x1 * ratio) / ratio;
      c.fillRect(begin, row.y + 1, Math.max(end - begin, 1 / ratio), row.height - 3);
      if (ends <= right && x1 - x0 > 1) gaps.push([end, Math.min(1, (x1 - x0) / 3), row]);
      if (x1 - x0 > 22 || tile.end[at] - tile.start[at] > 22 * view.perPixel)
        labels.set(tile.event[at], [tile, at, row]);
    }
    c.globalAlpha = 1;
    c.fillStyle = inks.paper;
    for (const [end, wide, row] of gaps) c.fillRect(end - wide, row.y + 1, wide, row.height - 3);
  }

  paintLabels(labels, view, inks) {
    const c = this.context;
    for (const [tile, at, row] of labels.values()) {
      const text = tile.texts.get(tile.name[at]);
      if (!text || row.height < 13) continue;
      const left = Math.max(this.x(tile.start[at]), this.gutter) + 5;
      const room = Math.min(this.x(tile.end[at]), this.width) - left - 5;
      const fitting = this.fit(text, room);
      if (!fitting) continue;
      const shade = tile.shade[at];
      c.fillStyle = this.faded(view, shade) ? inks.soft : inks.texts[shade];
      c.fillText(fitting, left, row.y + row.height / 2);
    }
  }

  paintChosen(view, inks) {
    if (!view.selected) return;
    const c = this.context;
    const box = ({ start_ns, end_ns, lane }) => {
      const row = this.layout.ofLane.get(lane);
      const x0 = Math.max(this.x(start_ns), this.gutter - 8);
      const x1 = Math.min(this.x(end_ns), this.width + 8);
      return { x: x0 - 1, y: this.top(row, view), width: Math.max(x1 - x0 + 1, 4), height: row.height - 1 };
    };
    const outline = (event, width, color) => {
      const { x, y, width: wide, height } = box(event);
      c.lineWidth = width;
      c.strokeStyle = color;
      c.strokeRect(x, y, wide, height);
    };
    for (const parent of view.selected.parents) outline(parent, 1, inks.soft);
    for (const other of view.selected.linked.slice(0, 8)) {
      const [from, to] = view.selected.on_gpu ? [other, view.selected] : [view.selected, other];
      const [a, b] = [box(from), box(to)];
      const [x0, y0, x1, y1] = [a.x + 1, a.y + a.height, b.x + 1, b.y];
      c.beginPath();
      c.moveTo(x0, y0);
      c.bezierCurveTo(x0, (y0 + y1) / 2, x1, (y0 + y1) / 2, x1, y1);
      c.lineWidth = 1.5;
      c.strokeStyle = inks.accent;
      c.stroke();
      outline(other, 1.5, inks.accent);
    }
    outline(view.selected, 4, inks.paper);
    outline(view.selected, 2, inks.ink);
  }

  /** The overview strip of the whole time: the part that is shown, and the search results. */
  paintOverview(view, inks) {
    const c = this.context;
    const { gutter, width } = this;
    const { origin, end } = this.scene;
    const at = (ns) => gutter + ((ns - origin) / (end - origin || 1)) * (width - gutter);
    const high = OVERVIEW - 6;
    c.fillStyle = inks.lane;
    c.fillRect(gutter, 3, width - gutter, high);
    const coarsest = this.store.get(0, 0);
    const image = coarsest && this.image(coarsest, view, inks);
    const used = (end - origin) / this.store.columnNs(0);
    const onGpu = coarsest
      ? [...coarsest.rows.keys()].filter((at) => this.layout.ofLane.get(coarsest.rows[at]).strip.kind === "gpu")
      : [];
    const drawn = onGpu.length || !coarsest ? onGpu : [...coarsest.rows.keys()];
    const each = high / (drawn.length || 1);
    c.globalAlpha = 0.6;
    drawn.forEach((row, at) =>
      c.drawImage(image, 0, 3 * row + 1, used, 1, gutter, 3 + at * each, width - gutter, each),
    );
    c.globalAlpha = 1;
    c.fillStyle = inks.accent;
    for (const mark of view.marks) c.fillRect(Math.round(at(mark)), 4, 1, high - 2);
    const left = Math.max(at(view.begin), gutter);
    const right = Math.min(at(view.begin + (width - gutter) * view.perPixel), width);
    c.globalAlpha = 0.28;
    c.fillRect(left, 3, Math.max(right - left, 3), high);
    c.globalAlpha = 1;
    c.strokeStyle = inks.accent;
    c.lineWidth = 1;
    c.strokeRect(Math.round(left) + 0.5, 3.5, Math.max(Math.round(right - left) - 1, 2), high - 1);
  }

  /** The row and the time at a point, with tile and index of a wide event, or with the load of a column. */
  at(view, x, y) {
    const found = { time: view.begin + (x - this.gutter) * view.perPixel, row: null, tile: null };
    const down = y - HEAD + view.top;
    found.row = this.layout.rows.find((row) => row.y <= down && down < row.y + row.height) ?? null;
    if (y < HEAD || x < this.gutter || !found.row || found.row.heading) return found;
    const part = this.shown.find(({ left, right }) => left <= x && x < right);
    if (!part) return found;
    const { tile } = part;
    const slack = view.perPixel;
    for (let at = 0; at < tile.start.length; at++) {
      if (
        tile.lane[at] === found.row.lane &&
        tile.start[at] - slack <= found.time &&
        found.time < tile.end[at] + slack
      ) {
        if (found.tile && !(tile.start[at] <= found.time && found.time < tile.end[at])) continue;
        Object.assign(found, { tile, place: at });
      }
    }
    const row = tile.rows.indexOf(found.row.lane);
    if (found.tile || row < 0) return found;
    const first = this.scene.origin + tile.index * this.store.tileNs(tile.level);
    const column = Math.floor((found.time - first) / this.store.columnNs(tile.level));
    const near = [column, column - 1, column + 1].find((each) => tile.columnFill[row * this.scene.columns + each] > 0);
    if (near === undefined || near < 0 || near >= this.scene.columns) return found;
    const place = row * this.scene.columns + near;
    return { ...found, columns: { shade: tile.columnShade[place], fill: tile.columnFill[place] / 255 } };
  }
}
