// Returns one line for each fault that a reader would see on a page.

const canvas = document.createElement("canvas");
canvas.width = canvas.height = 32;
const ink = canvas.getContext("2d", {willReadFrequently: true});

const colours = new Map();
const colour = (css) => { // any colour of CSS as [red, green, blue, alpha]
  if (!colours.has(css)) {
    ink.clearRect(0, 0, 1, 1);
    ink.fillStyle = css;
    ink.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = ink.getImageData(0, 0, 1, 1).data;
    colours.set(css, [r, g, b, a / 255]);
  }
  return colours.get(css);
};
const over = (top, below) =>
  [0, 1, 2].map((i) => top[3] * top[i] + (1 - top[3]) * below[i]).concat(1);
const luminance = (rgb) => {
  const [r, g, b] = rgb.map((v) => {
    const c = v / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};

const styleOf = (element) =>
  element.ownerDocument.defaultView.getComputedStyle(element);
const ground = (element) => { // what is behind the text of an element
  const seen = [];
  for (let e = element; e; e = e.parentElement) {
    seen.push(colour(styleOf(e).backgroundColor));
  }
  return seen.reduceRight((below, top) => over(top, below), [255, 255, 255, 1]);
};
const groundInPicture = (text, box) => { // the last shape before it that is under it
  const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  const svg = text.closest("svg");
  let found = ground(svg);
  for (const shape of svg.querySelectorAll("rect, path, circle, polygon")) {
    if (shape.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_PRECEDING) break;
    const at = shape.getBoundingClientRect();
    const inside = at.left <= x && x <= at.right && at.top <= y && y <= at.bottom;
    const fill = styleOf(shape).fill;
    if (inside && fill !== "none") found = over(colour(fill), found);
  }
  return found;
};

const isHidden = (element) => !element.checkVisibility({visibilityProperty: true}) ||
  Boolean(element.closest(".visually-hidden, .sr-only, .visually-hidden-focusable"));
const shorten = (words) => `"${words.trim().replace(/\s+/g, " ").slice(0, 40)}"`;

function* texts(page) { // [text, element, box] of every line that is shown
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    const isScript = element.closest("script, style, title, noscript, option, dialog");
    if (!node.data.trim() || isScript || isHidden(element)) continue;
    const range = page.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width > 1 && box.height > 1) yield [node.data, element, box];
    }
  }
}

// Returns the box that must contain an element's text: a block or a picture. Returns
// null if the text may scroll or is cut with an ellipsis.
const boxOf = (element) => {
  for (let e = element; e.parentElement; e = e.parentElement) {
    if (e.tagName === "svg") return [e.getBoundingClientRect(), "picture"];
    if (e.namespaceURI.endsWith("svg")) continue;
    const style = styleOf(e);
    if (/auto|scroll/.test(style.overflowX)) return [null, ""];
    if (style.overflowX !== "visible" && style.textOverflow === "ellipsis") {
      return [null, ""];
    }
    if (!/^(inline|contents)/.test(style.display)) {
      // A table that scrolls has cells as wide as their words.
      return [e.getBoundingClientRect(), e.tagName.toLowerCase()];
    }
  }
  return [null, ""];
};

const textFaults = (page) => {
  const found = new Set();
  for (const [words, element, box] of texts(page)) {
    const [outer, kind] = boxOf(element);
    if (outer && (box.right > outer.right + 1.5 || box.left < outer.left - 1.5)) {
      found.add(`${shorten(words)} is wider than its ${kind}`);
    }
    const style = styleOf(element);
    const inPicture = element.closest("svg");
    const text = colour(inPicture ? style.fill : style.color);
    const below = inPicture ? groundInPicture(element, box) : ground(element);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 600);
    const ratio = contrast(over(text, below), below);
    if (ratio < (isLarge ? 3 : 4.5)) {
      const where = inPicture ? "in a picture" : element.tagName.toLowerCase();
      found.add(`${shorten(words)} (${where}) has a contrast of ${ratio.toFixed(1)}`);
    }
    const least = inPicture ? 7 : 9;
    const shown = inPicture ? box.height / 1.2 : size;
    if (shown < least) found.add(`${shorten(words)} is ${shown.toFixed(1)} px high`);
  }
  return [...found];
};

const pictureFaults = (page, isDark) => {
  const found = [];
  for (const image of page.querySelectorAll("article img")) {
    if (isHidden(image)) continue;
    const name = image.getAttribute("src").split("/").pop();
    if (!image.complete || !image.getBoundingClientRect().width) {
      found.push(`${name} is not shown`);
      continue;
    }
    const scale = image.getBoundingClientRect().width / image.naturalWidth;
    if (scale < 0.5) found.push(`${name} is shown at ${scale.toFixed(2)} of its size`);
    ink.clearRect(0, 0, 32, 32);
    ink.filter = styleOf(image).filter;
    ink.drawImage(image, 0, 0, 32, 32);
    ink.filter = "none";
    const corners = [[1, 1], [30, 1], [1, 30], [30, 30]]
      .map(([x, y]) => [...ink.getImageData(x, y, 1, 1).data])
      .map(([r, g, b, a]) => luminance(over([r, g, b, a / 255], ground(image))));
    const mean = corners.reduce((a, b) => a + b) / 4;
    if (isDark ? mean > 0.25 : mean < 0.5) {
      found.push(`${name} has the ground of the other theme`);
    }
  }
  return found;
};

const blankFaults = (page) => {
  const article = page.querySelector("article").getBoundingClientRect();
  const spans = [...texts(page)]
    .filter(([, element]) => element.closest("article"))
    .map(([, , box]) => [box.top, box.bottom]);
  for (const e of page.querySelectorAll("article :is(img, svg, input, button)")) {
    const box = e.getBoundingClientRect();
    if (box.height && !isHidden(e)) spans.push([box.top, box.bottom]);
  }
  spans.sort((a, b) => a[0] - b[0]);
  let [end, found] = [article.top, []];
  for (const [top, bottom] of spans) {
    if (top - end > 160) found.push(`${Math.round(top - end)} px are empty at ${end}`);
    end = Math.max(end, bottom);
  }
  return spans.length > 5 ? found : ["the page is empty"];
};

const codeFaults = (page) => {
  const article = page.querySelector("article").getBoundingClientRect();
  return [...page.querySelectorAll("article pre")]
    .filter((pre) => !isHidden(pre))
    .filter((pre) => pre.getBoundingClientRect().right > article.right + 1 ||
      (pre.scrollWidth > pre.clientWidth && !/auto|scroll/.test(styleOf(pre).overflowX)))
    .map((pre) => `code does not scroll: ${shorten(pre.textContent)}`);
};

const linksInView = (page, within) => [...page.querySelectorAll(`${within} a`)]
  .map((a) => a.getBoundingClientRect())
  .filter((box) => box.width && box.left >= 0 && box.right <= page.body.clientWidth)
  .length;

const navigationFaults = async (page, width) => {
  const menu = ".bd-sidebar-primary, #pst-primary-sidebar-modal";
  if (width < 600) {
    const button = page.querySelector("button.primary-toggle, label.primary-toggle");
    const box = button?.getBoundingClientRect();
    if (!box?.width || box.right > width || box.top > 100) {
      return ["the menu has no button"];
    }
    button.click();
    await new Promise((resolve) => setTimeout(resolve, 500));
  }
  const found = linksInView(page, `:is(${menu})`);
  return found > 12 ? [] : [`the menu has ${found} links in view`];
};

const faults = async (page, width, isDark) => {
  const wide = page.documentElement.scrollWidth;
  return [
    ...(wide > width ? [`the page is ${wide} px wide`] : []),
    ...textFaults(page),
    ...pictureFaults(page, isDark),
    ...blankFaults(page),
    ...codeFaults(page),
    ...(await navigationFaults(page, width)), // last: it opens the menu
  ];
};
