// A timeline on its own page: the page's events answer the requests that Python answers in a notebook.

import { cutTile } from "./timeline_cut.js";
import { Events } from "./timeline_events.js";

/** Stands for a widget's model: has the methods that the view uses. */
class PageModel {
  constructor(scene, events) {
    this.scene = scene;
    this.events = events;
    this.found = { text: "", events: [], at: 0 };
    this.receive = () => {};
  }

  get(name) {
    return name === "scene" ? this.scene : []; // no tiles are sent: each is cut on request
  }

  on(_, receive) {
    this.receive = receive;
  }

  off() {
    this.receive = () => {};
  }

  /** Answers later, as Python would, so that a frame is drawn in between. */
  send(message) {
    setTimeout(() => this.answer(message));
  }

  answer(message) {
    const { events } = this;
    const reply = { view: message.view, reveal: message.reveal ?? false };
    if (message.kind === "tiles") {
      for (const [level, index] of message.tiles)
        this.receive({ kind: "tile", tile: cutTile(events, level, index) }, []);
    } else if (message.kind === "search") {
      this.receive({ ...reply, kind: "found", ...this.search(message) }, [events.marks(this.found.events)]);
    } else {
      const event = {
        details: () => message.event,
        at: () => events.nearest(message.lane, message.time),
        neighbour: () => events.neighbour(message.event, message.by),
      }[message.kind]();
      this.receive({ ...reply, kind: "details", details: event < 0 ? null : events.details(event) }, []);
    }
  }

  /** The match after the last one, or for a new text the first match that begins in the view or after it. */
  search({ text, by, time }) {
    if (text !== this.found.text) {
      const found = this.events.search(text);
      const next = found.findIndex((event) => this.events.start[event] >= time);
      this.found = { text, events: found, at: (next < 0 ? found.length : next) - Math.max(by, 0) };
    }
    const { events } = this.found;
    const count = events.length;
    this.found.at = count ? (this.found.at + by + count) % count : 0;
    const details = count ? this.events.details(events[this.found.at]) : null;
    return { text, count, at: this.found.at + 1, details };
  }
}

const FRAME = 150; // pixels of a window around the lanes
const SHEET = "680px"; // width that fits every paper size
const place = document.getElementById("timeline");

/** The widget's rules have the colours of JupyterLab's themes; on paper everything is light. */
function colour(dark) {
  document.body.dataset.jpThemeLight = String(!dark);
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
colour(dark.matches);
dark.addEventListener("change", () => colour(dark.matches));

const drawn = unpackedFrom("packed").then(
  (bytes) => {
    const end = bytes.indexOf(10); // of the JSON line; the columns follow it
    const { scene, ...header } = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
    scene.tallest = Math.max(window.innerHeight - FRAME, 320);
    const events = new Events(scene, header, bytes.subarray(end + 1));
    place.replaceChildren();
    render({ model: new PageModel(scene, events), el: place });
    const { timeline } = place.firstElementChild;
    const repaint = (isDark, width) => {
      colour(isDark);
      timeline.stage.style.width = width;
      timeline.resize();
      timeline.draw(); // at once: a browser prints the present content
    };
    addEventListener("beforeprint", () => repaint(false, SHEET));
    addEventListener("afterprint", () => repaint(dark.matches, ""));
    addEventListener("keydown", (event) => timeline.key(event)); // with any focus
    timeline.canvas.focus({ preventScroll: true });
    document.documentElement.dataset.drawn = "yes";
  },
  (error) => (place.textContent = `The timeline could not be drawn: ${error}`),
);
delayed(drawn);
