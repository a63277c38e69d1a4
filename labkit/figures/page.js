// Unpacks plotly.js and the figures of this page, and draws each at the width that its place has.
const NARROW = 480; // pixels: narrower places show a drawing of this width made smaller
const ON_PAPER = { width: 680, height: 760 }; // pixels that a sheet of any common size has next to a caption

async function unpacked() {
  const text = new TextDecoder().decode(await unpackedFrom("packed"));
  const end = text.indexOf("\n");
  const script = document.createElement("script");
  script.textContent = text.slice(end + 1);
  document.head.append(script);
  return JSON.parse(text.slice(0, end));
}

function draw(place, figure, sheet) {
  const room = sheet?.width ?? place.clientWidth;
  const least = sheet ? 0 : (figure.layout.meta?.labkit?.least ?? 0);
  const width = Math.max(room, least, NARROW);
  const height = figure.layout.height ?? 450;
  const scale = least > room ? 1 : Math.min(room / width, (sheet?.height ?? height) / height);
  const drawing = place.firstElementChild;
  place.classList.toggle("scrolls", least > room);
  place.classList.toggle("narrow", room < NARROW);
  place.style.height = scale < 1 ? `${height * scale}px` : "";
  drawing.style.width = `${width}px`;
  drawing.style.transform = scale < 1 ? `scale(${scale})` : "";
  if (drawing.drawnAt === width) return;
  drawing.drawnAt = width;
  const layout = { ...figure.layout, width, height };
  Plotly.react(drawing, figure.data, layout, { displaylogo: false, ...figure.config, responsive: false, plotlyServerURL: "" });
  place.classList.remove("covered");
  place.classList.toggle("covered", buttonsLieOnWords(drawing));
}

function buttonsLieOnWords(drawing) {
  const boxes = (selector) => [...drawing.querySelectorAll(selector)].map((element) => element.getBoundingClientRect());
  const buttons = boxes(".modebar-group");
  return boxes(".main-svg text").some((word) =>
    buttons.some(
      (button) =>
        word.left < button.right && button.left < word.right && word.top < button.bottom && button.top < word.bottom,
    ),
  );
}

function show(figures) {
  const places = [...document.querySelectorAll(".plot[data-figure]")];
  let sheet = null; // set while the page is printed
  const drawAll = () => places.forEach((place) => draw(place, figures[place.dataset.figure], sheet));
  const drawOn = (given) => {
    sheet = given;
    drawAll();
  };
  places.forEach((place) => place.replaceChildren(Object.assign(document.createElement("div"), { className: "drawing" })));
  drawAll();
  new ResizeObserver(drawAll).observe(document.querySelector("main"));
  addEventListener("beforeprint", () => drawOn(ON_PAPER));
  addEventListener("afterprint", () => drawOn(null));
  document.documentElement.dataset.drawn = "yes";
}

function refuse(why) {
  for (const place of document.querySelectorAll(".plot[data-figure]")) {
    place.innerHTML = '<p class="missing"></p>';
    place.firstElementChild.textContent = why;
  }
}

delayed(unpacked().then(show).catch((error) => refuse(`The figure could not be drawn: ${error}`)));
