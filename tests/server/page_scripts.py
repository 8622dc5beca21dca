"""What the browser tests ask a page, as JavaScript."""

CONTRASTS = """() => {
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    paint.clearRect(0, 0, 1, 1); paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => rgb(colour).slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (rgb(colour)[3]) return colour;
    }
    return "white";
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  for (let text; (text = walker.nextNode());) {
    const node = text.parentElement;
    if (!text.data.trim() || !node.checkVisibility({ visibilityProperty: true })) continue;
    const a = light(getComputedStyle(node).color), b = light(ground(node));
    found.push([text.data.trim().slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
  }
  return found;
}"""
"""[text, contrast with what is behind it] of every text that is shown."""
FOCUS = """() => {
  const node = document.activeElement;
  return getComputedStyle(node.closest("label.button") ?? node).outlineStyle;
}"""
"""The style of the outline around what has the focus."""
FOLLOWED = """() => {
  const foot = [...document.querySelectorAll(".foot")].at(-1).getBoundingClientRect();
  return foot.bottom <= document.querySelector("#log").getBoundingClientRect().bottom + 1;
}"""
"""The last answer's end is in sight."""
