// Reads bytes from the text of an element: gzip in digits of base 85 without any "<".
const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
const OLD_BROWSER = "This browser cannot unpack it; Chrome and Edge from 80, Firefox from 113 and Safari from 16.4 can.";

function bytesOf(text) {
  const padding = (5 - (text.length % 5)) % 5;
  const padded = text + DIGITS[84].repeat(padding);
  const value = new Uint8Array(128);
  for (let at = 0; at < 85; at++) value[DIGITS.charCodeAt(at)] = at;
  const bytes = new Uint8Array((padded.length / 5) * 4);
  const view = new DataView(bytes.buffer);
  for (let at = 0, place = 0; at < padded.length; at += 5, place += 4) {
    let number = 0;
    for (let digit = 0; digit < 5; digit++) number = number * 85 + value[padded.charCodeAt(at + digit)];
    view.setUint32(place, number);
  }
  return bytes.subarray(0, bytes.length - padding);
}

/** The bytes of an element's text. */
async function unpackedFrom(id) {
  if (typeof DecompressionStream === "undefined") throw OLD_BROWSER;
  const bytes = bytesOf(document.getElementById(id).textContent);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// The page counts as loading until its figures are drawn, so that an immediate print includes them: an open inner
// document delays the load event.
function delayed(work) {
  const frame = document.createElement("iframe");
  frame.hidden = true;
  document.body.append(frame);
  const inner = frame.contentDocument;
  inner.open();
  work.finally(() => {
    inner.close();
    frame.remove();
  });
}
