// The timeline, with mouse and keys.

import { OVERVIEW } from "./timeline_frame.js";
import { element } from "./timeline_panel.js";
import { duration } from "./timeline_scene.js";
import { View } from "./timeline_view.js";

const WHEEL = 0.0016; // zoom per pixel of the wheel
const CLICK = 4; // pixels that a click may move

class TimelineView extends View {
  constructor(model, root) {
    super(model, root);
    this.stop = this.listen();
  }

  listen() {
    const on = (target, events) =>
      Object.entries(events).forEach(([name, handle]) => target.addEventListener(name, handle, { passive: false }));
    on(this.root, { keydown: (event) => this.key(event) });
    on(this.canvas, {
      wheel: (event) => this.wheel(event),
      pointerdown: (event) => this.down(event),
      pointermove: (event) => this.move(event),
      pointerup: (event) => this.up(event),
      pointercancel: () => (this.drag = null),
      pointerleave: () => this.hint(null),
      dblclick: (event) => this.zoom(0.4, this.point(event).x),
      focus: () => this.change({ focused: true }),
      blur: () => this.change({ focused: false }),
    });
    const receive = (content, buffers) => this.receive(content, buffers);
    this.model.on("msg:custom", receive);
    const sizes = new ResizeObserver(() => this.resize());
    sizes.observe(this.stage);
    const themes = new MutationObserver(() => this.restyle());
    for (const target of [document.body, document.documentElement])
      themes.observe(target, {
        attributes: true,
        attributeFilter: ["class", "data-jp-theme-light", "data-jp-theme-name", "data-theme"],
      });
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    const restyle = () => this.restyle();
    dark.addEventListener("change", restyle);
    return () => {
      this.model.off("msg:custom", receive);
      sizes.disconnect();
      themes.disconnect();
      dark.removeEventListener("change", restyle);
    };
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.("input")) return; // an input has its own keys, as buttons have Enter
    if (event.key === "Enter" && event.target.closest?.("button, summary")) return;
    const far = this.room * 0.15;
    const keys = {
      ArrowLeft: () => (event.shiftKey ? this.step(-1) : this.pan(-far)),
      ArrowRight: () => (event.shiftKey ? this.step(1) : this.pan(far)),
      ArrowUp: () => this.chooseLane(-1),
      ArrowDown: () => this.chooseLane(1),
      PageUp: () => this.scroll(-200),
      PageDown: () => this.scroll(200),
      Enter: () => this.selectAt(this.lane ?? this.scene.strips[0].first, this.middle),
      Escape: () => this.select(null),
      Home: () => this.place(this.scene.all[0], this.perPixel),
      End: () => this.place(this.scene.all[1] - this.room * this.perPixel, this.perPixel),
      "+": () => this.zoom(1 / 1.6),
      "=": () => this.zoom(1 / 1.6),
      "-": () => this.zoom(1.6),
      0: () => this.show(...this.scene.all),
      f: () => this.fit(),
      n: () => this.ask({ kind: "search", text: this.panel.input.value, by: 1, time: this.begin }),
      N: () => this.ask({ kind: "search", text: this.panel.input.value, by: -1, time: this.begin }),
      "/": () => this.panel.input.focus(),
    };
    if (!(event.key in keys)) return;
    keys[event.key]();
    event.preventDefault();
    event.stopPropagation();
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  wheel(event) {
    if (!this.focused && !event.ctrlKey) return; // else the user could not scroll past the timeline
    event.preventDefault();
    const size = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? this.room : 1;
    const [x, y] = [event.deltaX * size, event.deltaY * size];
    if (event.shiftKey) this.pan(x || y);
    else if (event.altKey) this.scroll(y);
    else if (Math.abs(x) > Math.abs(y)) this.pan(x);
    else this.zoom(Math.exp(y * (event.ctrlKey ? 6 : 1) * WHEEL), this.point(event).x);
  }

  down(event) {
    if (event.button !== 0) return;
    const { x, y } = this.point(event);
    this.canvas.focus();
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { x, y, begin: this.begin, top: this.top, moved: false, overview: y < OVERVIEW };
    if (this.drag.overview) this.jump(x);
  }

  jump(x) {
    const { origin, end } = this.scene;
    const time = origin + ((x - this.painter.gutter) / this.room) * (end - origin);
    this.place(time - (this.room * this.perPixel) / 2, this.perPixel);
  }

  move(event) {
    const { x, y } = this.point(event);
    if (!this.drag) return this.hint({ x, y });
    if (this.drag.overview) return this.jump(x);
    this.drag.moved ||= Math.hypot(x - this.drag.x, y - this.drag.y) > CLICK;
    if (!this.drag.moved) return;
    this.hint(null);
    this.canvas.classList.add("lkt-dragging");
    this.scroll(this.drag.top - (y - this.drag.y) - this.top);
    this.place(this.drag.begin - (x - this.drag.x) * this.perPixel, this.perPixel);
  }

  up(event) {
    const drag = this.drag;
    this.drag = null;
    this.canvas.classList.remove("lkt-dragging");
    if (!drag || drag.moved || drag.overview) return;
    const { x, y } = this.point(event);
    const found = this.painter.at(this, x, y);
    if (found.tile) this.ask({ kind: "details", event: found.tile.event[found.place] });
    else if (found.columns) this.selectAt(found.row.lane, found.time);
    else this.select(null);
    if (found.row && !found.row.heading) this.change({ lane: found.row.lane });
  }

  /** The tip for the event under the mouse. */
  hint(point) {
    const found = point && this.perPixel ? this.painter.at(this, point.x, point.y) : {};
    let lines = null;
    if (found.tile) {
      const { tile, place } = found;
      lines = [
        tile.texts.get(tile.name[place]) ?? "",
        `${this.scene.shades[tile.shade[place]].name}, ${duration(tile.end[place] - tile.start[place])}`,
      ];
    } else if (found.columns) {
      lines = [
        "",
        `short events, mostly ${this.scene.shades[found.columns.shade].name}, busy ${Math.max(Math.round(found.columns.fill * 100), 1)} %`,
      ];
    }
    this.canvas.classList.toggle("lkt-over", lines !== null);
    this.tip.hidden = lines === null;
    if (!lines) return;
    this.tip.replaceChildren(...lines.filter(Boolean).map((line, at) => element(at ? "div" : "b", {}, line)));
    const { offsetWidth: wide, offsetHeight: high } = this.tip;
    const left = Math.min(point.x + 14, this.painter.width - wide - 4);
    const top = point.y + 18 + high < this.painter.height ? point.y + 18 : point.y - high - 8;
    this.tip.style.transform = `translate(${Math.max(left, 4)}px, ${top}px)`;
  }
}

function render({ model, el }) {
  const root = element("div", { class: "labkit-timeline" });
  el.append(root);
  const view = new TimelineView(model, root);
  root.timeline = view; // for tests and for the browser's console
  return () => view.stop();
}

export default { render };
