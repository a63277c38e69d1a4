// All events of a timeline on its own page: unpacks them, and answers the requests that Python answers in a notebook.

const LINKED = 50; // most launched events in the details of an event
const MARKS = 4000; // positions of search results

/** Numbers from planes of bytes, the lowest plane first, which follow each other from `at`. */
function column(bytes, at, count, planes) {
  const numbers = new Float64Array(count);
  for (let plane = 0, size = 1; plane < planes; plane++, size *= 256) {
    const first = at + plane * count;
    for (let event = 0; event < count; event++) numbers[event] += bytes[first + event] * size;
  }
  return numbers;
}

/** Sums up zigzag-coded differences: 2 d stands for the difference d, and 2 d - 1 for -d. */
function summed(changes) {
  let sum = 0;
  return changes.map((change) => (sum += change % 2 ? -(change + 1) / 2 : change / 2));
}

export class Events {
  /** `header` and `planes`: the events, packed by packing.py; `scene`: of the timeline. */
  constructor(scene, header, planes) {
    Object.assign(this, header, { scene, size: header.events });
    const columns = {};
    let at = 0;
    for (const [name, width] of Object.entries(header.columns)) {
      columns[name] = column(planes, at, this.size, width);
      at += width * this.size;
    }
    this.name = Int32Array.from(columns.name);
    this.shade = Uint8Array.from(columns.shade);
    this.about = Int32Array.from(columns.about);
    this.call = summed(columns.call); // the number of an event, + 1
    this.owner = summed(columns.owner);
    this.start = new Float64Array(this.size);
    this.end = new Float64Array(this.size);
    this.lane = new Uint16Array(this.size);
    this.bounds = [0]; // the first event of each lane
    for (const [lane, count] of header.counts.entries()) {
      const first = this.bounds[lane];
      let time = scene.origin;
      for (let event = first; event < first + count; event++) {
        this.lane[event] = lane;
        this.start[event] = time + columns.gap[event];
        this.end[event] = time = this.start[event] + columns.length[event];
      }
      this.bounds.push(first + count);
    }
    this.strips = scene.strips.flatMap((strip) => Array(strip.lanes).fill(strip)); // of each lane
  }

  /** The name on an event for a row of `texts`. */
  short(name) {
    return this.shorts[name] ?? this.texts[name];
  }

  /** The first event of a lane that begins after `time`; if there is none, the first event of the next lane. */
  after(lane, time) {
    let [low, high] = [this.bounds[lane], this.bounds[lane + 1]];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** The event of a lane that is at `time` or closest to it; -1 in an empty lane. */
  nearest(lane, time) {
    const [first, beyond] = [this.bounds[lane], this.bounds[lane + 1]];
    if (first === beyond) return -1;
    const at = this.after(lane, time);
    const [before, next] = [Math.max(at - 1, first), Math.min(at, beyond - 1)];
    return time - this.end[before] <= this.start[next] - time ? before : next;
  }

  /** The event `by` places further in the same lane; at the lane's end, the last one. */
  neighbour(event, by) {
    const lane = this.lane[event];
    return Math.min(Math.max(event + by, this.bounds[lane]), this.bounds[lane + 1] - 1);
  }

  /** The events whose name contains `text`, in any case, in the order of their starts. */
  search(text) {
    if (!text) return [];
    const wanted = text.toLowerCase();
    const holds = this.texts.map((name) => name.toLowerCase().includes(wanted));
    const found = [];
    for (let event = 0; event < this.size; event++) if (holds[this.name[event]]) found.push(event);
    return found.sort((a, b) => this.start[a] - this.start[b] || a - b);
  }

  /** The start times of some search results. */
  marks(found) {
    const count = Math.min(found.length, MARKS);
    return Float64Array.from({ length: count }, (_, at) => this.start[found[Math.floor((at * found.length) / count)]]);
  }

  summary(event) {
    return {
      event,
      name: this.texts[this.name[event]],
      short: this.short(this.name[event]),
      lane: this.lane[event],
      start_ns: this.start[event],
      end_ns: this.end[event],
      duration_ns: this.end[event] - this.start[event],
    };
  }

  /** The details of an event; events.py describes the fields. */
  details(event) {
    const strip = this.strips[this.lane[event]];
    const about = this.abouts[this.about[event]];
    const onGpu = strip.kind === "gpu";
    const caller = this.call[event] - 1;
    const linked = onGpu ? (caller < 0 ? [] : [caller]) : this.launched(event);
    const parents = onGpu ? (caller < 0 ? [] : this.around(caller)) : this.around(event);
    const inward = strip.kind === "ranges" ? [event, ...[...parents].reverse()] : [...parents].reverse();
    const owners = this.owner[event] ? [this.owner[event] - 1] : inward;
    const [phase, layer, stage] = owners.map((range) => this.label(range)).find(Boolean) ?? [null, null, null];
    return {
      ...this.summary(event),
      kind: about.kind,
      shade: this.scene.shades[this.shade[event]].name,
      on_gpu: onGpu,
      trace: this.scene.names[strip.trace],
      process: strip.process,
      thread: strip.thread,
      phase,
      layer,
      stage,
      facts: about.facts,
      parents: parents.map((each) => this.summary(each)),
      linked: linked.map((each) => this.summary(each)),
    };
  }

  /** The operations that a call launched, in the order of their starts. */
  launched(call) {
    const found = [];
    for (let event = 0; event < this.size; event++) if (this.call[event] === call + 1) found.push(event);
    return found.sort((a, b) => this.start[a] - this.start[b] || a - b).slice(0, LINKED);
  }

  /** The ranges around a range or a call on its thread, the outermost first. */
  around(event) {
    const own = this.strips[this.lane[event]];
    const of = (strip) => ["trace", "process", "thread"].every((name) => strip[name] === own[name]);
    const ranges = this.scene.strips.find((strip) => strip.kind === "ranges" && of(strip));
    if (!ranges) return [];
    const [start, end] = [this.start[event], this.end[event]];
    const found = [];
    for (let lane = ranges.first; lane < ranges.first + ranges.lanes; lane++) {
      const range = this.after(lane, start) - 1;
      if (range < this.bounds[lane] || this.end[range] < end || range === event) continue;
      const same = own === ranges && this.start[range] === start && this.end[range] === end;
      if (!same || lane < this.lane[event]) found.push(range);
    }
    found.sort((a, b) => this.start[a] - this.start[b] || this.end[b] - this.end[a] || a - b);
    return found;
  }

  /** Phase, layer and stage of a range; null if it is not labkit's. */
  label(range) {
    const known = this.labels[this.name[range]];
    return known && this.abouts[this.about[range]].facts.domain === this.domain ? known : null;
  }
}
