// The timeline's view: the visible part, the selection, and the requests to Python.

import { TileStore, decodeTile } from "./timeline_tiles.js";
import { Painter } from "./timeline_canvas.js";
import { HEAD } from "./timeline_frame.js";
import { Panel, element } from "./timeline_panel.js";
import { Inks } from "./timeline_scene.js";

const NARROWEST = 0.02; // ns per pixel
const TALLEST = 520; // pixels at the beginning, unless the scene sets another height

export class View {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.scene = model.get("scene");
    this.token = Math.random().toString(36).slice(2);
    this.store = new TileStore(this.scene, (tiles) => this.ask({ kind: "tiles", tiles }));
    for (const tile of model.get("tiles")) this.store.add(decodeTile(tile, tile.buffers));
    Object.assign(this, { begin: this.scene.view[0], perPixel: 0, top: 0, lane: null, selected: null, focused: false });
    Object.assign(this, { marks: [], emphasised: new Set(), frames: 0, due: false });
    this.build();
  }

  build() {
    const { scene } = this;
    this.panel = new Panel(scene, {
      search: (text, by) => this.ask({ kind: "search", text, by, time: this.begin }),
      zoom: (factor) => this.zoom(factor),
      all: () => this.show(...scene.all),
      emphasise: (shade) => this.emphasise(shade),
      show: (event) => this.ask({ kind: "details", event, reveal: true }),
      focus: () => this.canvas.focus(),
    });
    this.canvas = element("canvas", {
      tabindex: "0",
      role: "application",
      "aria-roledescription": "timeline",
      "aria-label": `${scene.title}. Left and right move in time, plus and minus zoom, up and down choose a lane, Enter selects.`,
    });
    this.tip = element("div", { class: "lkt-tip", "aria-hidden": "true", hidden: "" });
    this.stage = element("div", { class: "lkt-stage" }, this.canvas, this.tip);
    this.root.append(this.panel.bar, this.panel.legend, this.stage, this.panel.details, this.panel.help);
    this.root.dataset.lmSuppressShortcuts = "true"; // else JupyterLab's keys would move cells while ours move the view
    this.root.dataset.state = "loading";
    this.painter = new Painter(this.canvas, scene, this.store);
    this.stage.style.height = `${Math.min(scene.tallest ?? TALLEST, this.painter.layout.height + HEAD)}px`;
  }

  ask(message) {
    this.model.send({ view: this.token, ...message });
  }

  receive(content, buffers) {
    if (content.kind === "tile") {
      this.store.add(content.tile ?? decodeTile(content, buffers));
      this.redraw();
    } else if (content.view !== this.token) {
      return;
    } else if (content.kind === "details") {
      this.select(content.details, content.reveal);
    } else if (content.kind === "found") {
      const marks = buffers[0];
      this.marks = new Float64Array(marks.buffer.slice(marks.byteOffset, marks.byteOffset + marks.byteLength));
      this.panel.found(content);
      if (content.details) this.select(content.details, true);
      this.redraw();
    }
  }

  // the visible part

  get room() {
    return this.painter.width - this.painter.gutter;
  }

  get middle() {
    return this.begin + (this.room / 2) * this.perPixel;
  }

  change(values) {
    Object.assign(this, values);
    this.redraw();
  }

  restyle() {
    if (!this.perPixel) return;
    this.inks = new Inks(this.root, this.scene);
    this.redraw();
  }

  resize() {
    const { clientWidth, clientHeight } = this.stage;
    if (!clientWidth || !clientHeight) return; // hidden
    const [begin, end] = this.perPixel ? [this.begin, this.begin + this.room * this.perPixel] : this.scene.view;
    this.painter.resize(clientWidth, clientHeight);
    this.inks = new Inks(this.root, this.scene); // the theme's colours are known only on a page
    this.show(begin, end);
  }

  /** Shows all of the time from `begin` to `end`. */
  show(begin, end) {
    this.place(begin, (end - begin) / this.room);
  }

  /** `perPixel` within the limits of the zoom. */
  limited(perPixel) {
    const [first, last] = this.scene.all;
    return Math.min(Math.max(perPixel, NARROWEST), ((last - first) * 1.5) / this.room);
  }

  /** Shows the time from `begin` on. The middle of the view stays among the events. */
  place(begin, perPixel) {
    const [first, last] = this.scene.all;
    this.perPixel = this.limited(perPixel);
    const half = (this.room * this.perPixel) / 2;
    this.begin = Math.min(Math.max(begin, first - half), last - half);
    this.panel.showing(this.room * this.perPixel);
    this.redraw();
  }

  pan(pixels) {
    this.place(this.begin + pixels * this.perPixel, this.perPixel);
  }

  zoom(factor, x = this.painter.gutter + this.room / 2) {
    const at = Math.max(x - this.painter.gutter, 0);
    const time = this.begin + at * this.perPixel;
    const perPixel = this.limited(this.perPixel * factor);
    this.place(time - at * perPixel, perPixel);
  }

  scroll(pixels) {
    const most = Math.max(this.painter.layout.height + HEAD - this.painter.height, 0);
    this.change({ top: Math.min(Math.max(this.top + pixels, 0), most) });
  }

  emphasise(shade) {
    if (!this.emphasised.delete(shade)) this.emphasised.add(shade);
    this.panel.pressedChips(this.emphasised);
    this.redraw();
  }

  redraw() {
    if (this.due || !this.perPixel || !this.painter.width) return;
    this.due = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.due = false;
    const whole = this.painter.paint(this, this.inks);
    this.frames += 1;
    this.request();
    if (whole && !this.readyAt)
      requestAnimationFrame(() => (this.readyAt = performance.timeOrigin + performance.now()));
    this.root.dataset.state = whole ? "ready" : "loading";
  }

  /** The visible tiles first, then the tiles that a move or a zoom would show next. */
  request() {
    const level = this.store.levelFor(this.perPixel);
    const end = this.begin + this.room * this.perPixel;
    const seen = this.store.between(level, this.begin, end).map((index) => [level, index]);
    const reach = this.store.tileNs(level);
    const around = this.store.between(level, this.begin - reach, end + reach).map((index) => [level, index]);
    const finer =
      level + 1 < this.scene.levels
        ? this.store.between(level + 1, this.middle, this.middle).map((index) => [level + 1, index])
        : [];
    const coarser = level > 0 ? this.store.between(level - 1, this.begin, end).map((index) => [level - 1, index]) : [];
    this.store.want([...seen, ...around, ...coarser, ...finer]);
  }

  // the selection

  select(details, reveal) {
    if (details && reveal) this.reveal(details);
    this.panel.say(details);
    this.change({ selected: details, lane: details ? details.lane : this.lane });
  }

  /** Moves as little as needed to make the event visible and wide enough. An event without length stays a line. */
  reveal({ start_ns: start, end_ns: end, lane }) {
    const pixels = (end - start) / this.perPixel;
    if (end > start && pixels < 6) this.perPixel = Math.max((end - start) / 90, NARROWEST);
    if (pixels > this.room) this.perPixel = ((end - start) / this.room) * 1.1;
    const last = this.begin + this.room * this.perPixel;
    if (start < this.begin || end > last) this.place((start + end - this.room * this.perPixel) / 2, this.perPixel);
    else this.place(this.begin, this.perPixel);
    this.sight(lane);
  }

  /** Scrolls as little as needed to make a lane visible. */
  sight(lane) {
    const { y, height } = this.painter.layout.ofLane.get(lane);
    const room = this.painter.height - HEAD;
    if (y < this.top) this.scroll(y - 24 - this.top);
    else if (y + height > this.top + room) this.scroll(y + height + 8 - room - this.top);
  }

  selectAt(lane, time) {
    this.ask({ kind: "at", lane, time: Math.round(time) });
  }

  step(by) {
    if (this.selected) this.ask({ kind: "neighbour", event: this.selected.event, by, reveal: true });
    else if (this.lane !== null) this.selectAt(this.lane, this.middle);
  }

  chooseLane(by) {
    const lanes = [...this.painter.layout.ofLane.keys()];
    const at = this.lane === null ? (by > 0 ? 0 : lanes.length - 1) : lanes.indexOf(this.lane) + by;
    const lane = lanes[Math.min(Math.max(at, 0), lanes.length - 1)];
    this.change({ lane });
    this.sight(lane);
  }

  fit() {
    if (!this.selected) return;
    const { start_ns: start, end_ns: end } = this.selected;
    const margin = Math.max((end - start) * 0.1, 5);
    this.show(start - margin, end + margin);
  }
}
