// Plots bubble against activations of each schedule, as `megatron-ext plan` computes them for the chosen sizes.
document$.subscribe(async () => {
  const root = document.getElementById("explorer");
  if (!root) return;
  const folder = new URL("plan.json", document.baseURI);
  const plans = await (await fetch(folder)).json();
  const form = root.querySelector("form"), svg = root.querySelector("svg");
  let chosen = "bitpipe";

  const title = (plan) => [plan.schedule, ...Object.entries(plan.options).map(([k, v]) => `${k}=${v}`)].join(" ");
  const element = (name, attributes, text, parent = svg) => {
    const made = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const offer = (name, values, start) => {
    const select = form.elements[name], before = select.value || start;
    select.replaceChildren(...[...new Set(values)].map((value) => new Option(value, value)));
    select.value = before;
    if (select.selectedIndex < 0) select.selectedIndex = Math.min(1, select.length - 1);
  };
  const show = (plan) => {
    chosen = title(plan);
    root.querySelector("strong").textContent = chosen;
    root.querySelector("span").textContent =
      `bubble ${(100 * plan.bubble_ratio).toFixed(1)} %, at most ${plan.peak_activations} activations of 1/pp of the model, ` +
      `${plan.weight_copies} ${plan.weight_copies > 1 ? "copies" : "copy"} of the weights, ${plan.p2p_messages} messages`;
    root.querySelector("code").textContent = plan.flags;
    root.querySelector("img").src = new URL(plan.picture, folder);
    for (const group of svg.querySelectorAll("g")) group.classList.toggle("chosen", group.dataset.title === chosen);
  };
  const draw = () => {
    offer("num_microbatches", plans.filter((p) => p.pp == form.elements.pp.value).map((p) => p.num_microbatches));
    const found = plans.filter((p) => ["pp", "num_microbatches", "latency"].every((key) => p[key] == form.elements[key].value));
    const right = Math.max(...found.map((p) => p.bubble_ratio), 0.01) * 1.05;
    const top = Math.max(...found.map((p) => p.peak_activations)) * 1.1;
    const x = (ratio) => 50 + (ratio / right) * 480, y = (count) => 320 - (count / top) * 300;
    svg.replaceChildren();
    for (let part = 0; part <= 4; part++) {
      const ratio = (right * part) / 4, count = (top * part) / 4;
      element("line", { x1: x(ratio), x2: x(ratio), y1: 20, y2: 320 });
      element("line", { x1: 50, x2: 530, y1: y(count), y2: y(count) });
      element("text", { x: x(ratio), y: 338, "text-anchor": "middle" }, `${(100 * ratio).toFixed(0)} %`);
      element("text", { x: 44, y: y(count) + 4, "text-anchor": "end" }, count.toFixed(1));
    }
    element("text", { x: 290, y: 356, "text-anchor": "middle" }, "bubble");
    element("text", { x: 50, y: 12 }, "activations of a rank; orange: two copies of the weights");
    const taken = [];
    found.sort((one, other) => other.peak_activations - one.peak_activations);
    for (const plan of found) {
      const group = element("g", { tabindex: 0, class: plan.weight_copies > 1 ? "copies" : "" });
      group.dataset.title = title(plan);
      const [left, base] = [x(plan.bubble_ratio), y(plan.peak_activations)];
      let line = base + 4; // stack the names of neighbouring points
      const end = left + 20 + 7 * title(plan).length;
      while (taken.some(([l, r, b]) => l < end && left < r && Math.abs(b - line) < 14)) line += 14;
      taken.push([left, end, line]);
      if (line > base + 4) element("line", { x1: left, y1: base, x2: left + 12, y2: line - 4 }, undefined, group);
      element("circle", { cx: left, cy: base, r: 6 }, undefined, group);
      element("text", { x: left + 14, y: line }, title(plan), group);
      group.onclick = () => show(plan);
      group.onkeydown = (event) => event.key === "Enter" && show(plan);
    }
    show(found.find((p) => title(p).startsWith(chosen)) || found[0]);
  };
  offer("pp", plans.map((p) => p.pp), "4");
  offer("latency", plans.map((p) => p.latency), "0");
  form.onchange = draw;
  draw();
  root.hidden = false;
});
