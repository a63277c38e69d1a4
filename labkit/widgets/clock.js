// The time of a run. The browser counts it while the run goes on.
function text(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const two = (number) => String(number).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

function render({ model, el }) {
  const words = document.createElement("span");
  Object.assign(words.style, {
    marginLeft: "8px",
    whiteSpace: "nowrap",
    lineHeight: "var(--jp-widgets-inline-height, 28px)",
    fontVariantNumeric: "tabular-nums",
  });
  el.append(words);
  const show = () => {
    const [begun, took, left] = [model.get("begun"), model.get("took"), model.get("left")];
    const now = Date.now() / 1000;
    const rest = left < 0 ? "" : `, about ${text(left - (now - model.get("estimated")))} left`;
    words.textContent = !begun ? "" : took < 0 ? `${text(now - begun)}${rest}` : `took ${text(took)}`;
  };
  const ticking = setInterval(show, 1000);
  model.on("change", show);
  show();
  return () => {
    clearInterval(ticking);
    model.off("change", show);
  };
}

export default { render };
