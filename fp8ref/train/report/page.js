// Values on hover, and zoom, of the figures of a page. Nothing is fetched, and the page reads without it.
// Each svg's data-readout has, for each of its axes, the place, the limits, and what is drawn (fp8ref/plots/readout.py).
(() => {
  const NS = document.querySelector("svg")?.namespaceURI
  const make = (name, attributes = {}, parent = null) => {
    const element = document.createElementNS(NS, name)
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value)
    parent?.append(element)
    return element
  }
  const said = (v) => v === null || v === undefined ? "-" : Math.abs(v) >= 1e5 ? v.toLocaleString("en") : String(+v.toPrecision(4))
  const clamp = (v, low, high) => Math.min(Math.max(v, low), high)

  // Round numbers within [low, high], at most about five.
  const ticks = (low, high, log) => {
    if (log && high / low > 20) {
      const found = []
      for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++) found.push(10 ** e)
      return found.filter((v) => v >= low && v <= high)
    }
    const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough))
    const step = power * [1, 2, 5, 10].find((v) => v * power >= rough)
    const found = []
    for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(+(i * step).toPrecision(6))
    return found
  }

  class Chart {
    constructor(view, svg, group, about) {
      Object.assign(this, { view, svg, group, about })
      this.scale = (v) => about.log ? Math.log10(v) : v
      this.whole = { x: about.x, y: about.y.map(this.scale) }
      this.limits = structuredClone(this.whole)
      this.cursor = make("line", { class: "cursor", y1: about.box[1], y2: about.box[3] }, svg)
      this.frame = make("rect", { class: "frame" }, svg)
    }

    inside([x, y]) {
      const [left, top, right, bottom] = this.about.box
      return x >= left && x <= right && y >= top && y <= bottom
    }

    // From the svg's units to data, and back; y of logarithmic axes is log10.
    data([x, y], { x: [x0, x1], y: [y0, y1] } = this.limits) {
      const [left, top, right, bottom] = this.about.box
      return [x0 + (x - left) / (right - left) * (x1 - x0), y0 + (bottom - y) / (bottom - top) * (y1 - y0)]
    }
    place([x, y], { x: [x0, x1], y: [y0, y1] } = this.limits) {
      const [left, top, right, bottom] = this.about.box
      return [left + (x - x0) / (x1 - x0) * (right - left), bottom - (y - y0) / (y1 - y0) * (bottom - top)]
    }

    // {title, rows: [[name, value, color]], x}: what is at a point; null if nothing is.
    read(point) {
      const { about } = this, [x, y] = this.data(point)
      if (about.values) {
        const column = clamp(Math.round(x), 0, about.columns.length - 1), row = clamp(Math.round(y), 0, about.rows.length - 1)
        const title = [about.title, about.rows[row], about.columns[column]].filter(Boolean).join(", ")
        return { title, rows: [[about.what, said(about.values[row][column])]], x: this.place([column, 0])[0] }
      }
      const all = [...new Set(about.series.flatMap((s) => s.x))].filter((v) => v >= this.limits.x[0] && v <= this.limits.x[1])
      if (!all.length) return null
      const at = all.reduce((best, v) => Math.abs(v - x) < Math.abs(best - x) ? v : best)
      const rows = about.series.flatMap((s) => {
        const i = s.x.indexOf(at)
        if (i < 0) return []
        return [[s.name, said(s.y[i]) + (s.low ? ` [${said(s.low[i])}, ${said(s.high[i])}]` : ""), s.color]]
      })
      const title = about.points ? `${at}: ${about.points[at - 1]}` : `${about.xlabel} ${at}`
      return { title, rows, x: this.place([at, 0])[0] }
    }

    show(point) {
      const found = this.read(point)
      if (!found) return this.view.hide()
      this.at = found.x
      this.cursor.setAttribute("x1", found.x)
      this.cursor.setAttribute("x2", found.x)
      this.cursor.classList.add("shown")
      this.view.say(found, this.svg, point)
    }

    // Step to the next or previous value, by a key.
    move(by) {
      const { about } = this, [left, , right] = about.box
      const xs = about.values ? about.columns.map((_, i) => i) : [...new Set(about.series.flatMap((s) => s.x))].sort((a, b) => a - b)
      const seen = xs.filter((v) => v >= this.limits.x[0] && v <= this.limits.x[1])
      if (!seen.length) return
      const now = this.at === undefined ? 0 : this.data([clamp(this.at, left, right), 0])[0]
      const i = seen.reduce((best, v, j) => Math.abs(v - now) < Math.abs(seen[best] - now) ? j : best, 0)
      const next = seen[this.at === undefined ? i : clamp(i + by, 0, seen.length - 1)]
      this.show([this.place([next, 0])[0], (about.box[1] + about.box[3]) / 2])
    }

    // Show these limits: of lines, y fits what is in the range of x.
    zoom(x, y) {
      const { about } = this
      if (about.series) {
        const found = about.series.flatMap((s) => s.x.flatMap((v, i) => v >= x[0] && v <= x[1] ? [s.y, s.low, s.high].map((of) => of?.[i]).filter((v) => v != null).map(this.scale) : []))
        const low = Math.min(...found), high = Math.max(...found), room = 0.06 * (high - low || Math.abs(high) || 1)
        y = found.length ? [low - room, high + room] : this.whole.y
      }
      this.limits = { x, y }
      this.draw()
    }
    reset() {
      this.limits = structuredClone(this.whole)
      this.draw()
    }
    get zoomed() {
      return JSON.stringify(this.limits) !== JSON.stringify(this.whole)
    }

    draw() {
      if (!this.moved) this.wrap()
      const corner = (point) => this.place(this.data(point, this.whole))
      const [left, top, right, bottom] = this.about.box, [a, b] = corner([left, top]), [c, d] = corner([right, bottom])
      const sx = (c - a) / (right - left), sy = (d - b) / (bottom - top)
      for (const g of this.moved) g.setAttribute("transform", `matrix(${sx} 0 0 ${sy} ${a - sx * left} ${b - sy * top})`)
      for (const [use, x, y] of this.markers) use.setAttribute("transform", `matrix(${1 / sx} 0 0 ${1 / sy} ${x - x / sx} ${y - y / sy})`)
      this.axes()
      this.view.reset.hidden = ![...this.view.charts].some((chart) => chart.zoomed)
    }

    // What is cut by the axes moves within the cut; markers keep their size.
    wrap() {
      this.moved = []
      this.markers = []
      for (const element of this.group.querySelectorAll("[clip-path]")) {
        if (element.closest(".xtick, .ytick")) continue
        const outer = make("g", { "clip-path": element.getAttribute("clip-path") }), inner = make("g", { class: "moved" }, outer)
        element.removeAttribute("clip-path")
        element.replaceWith(outer)
        inner.append(element)
        this.moved.push(inner)
        for (const use of inner.querySelectorAll("use")) {
          const x = +use.getAttribute("x"), y = +use.getAttribute("y")
          if (this.inside([x, y])) this.markers.push([use, x, y])
        }
      }
    }

    // Ticks of the limits, in the places and the style of the figure's own.
    axes() {
      this.drawn?.remove()
      const { about } = this
      for (const tick of this.group.querySelectorAll(".xtick, .ytick")) tick.style.display = this.zoomed ? "none" : ""
      if (!this.zoomed) return
      this.drawn = make("g", {}, this.group)
      for (const [axis, index, names] of [["x", 0, about.places], ["y", 1, about.labels]]) {
        const like = this.group.querySelector(`.${axis}tick text`)
        if (!like) continue
        const [low, high] = [...this.limits[axis]].sort((a, b) => a - b)
        const log = about.log && axis === "y"
        let places
        if (names) {
          const all = names.map((name, i) => [i, name]).filter(([i]) => i > low - 0.01 && i < high + 0.01)
          const every = Math.ceil(all.length / (axis === "x" ? 6 : 24))
          places = all.filter((_, i) => i % every === 0)
        } else places = ticks(log ? 10 ** low : low, log ? 10 ** high : high, log).map((v) => [log ? Math.log10(v) : v, said(v)])
        for (const [value, name] of places) {
          const at = this.place(axis === "x" ? [value, 0] : [0, value])[index]
          if (axis === "y" && !names) make("path", { class: "grid", d: `M${about.box[0]} ${at}H${about.box[2]}` }, this.drawn)
          const y = axis === "x" ? like.getAttribute("y") : at + 3.5
          const text = make("text", { style: like.getAttribute("style"), x: axis === "x" ? at : like.getAttribute("x"), y }, this.drawn)
          if (axis === "x") text.style.textAnchor = "middle"
          text.textContent = name
        }
      }
    }
  }

  class View {
    constructor(svg) {
      this.svg = svg
      this.figure = svg.closest("figure")
      this.figure.classList.add("live")
      const groups = svg.querySelectorAll("g.axes")
      this.charts = JSON.parse(svg.dataset.readout).flatMap((about, i) => about ? [new Chart(this, svg, groups[i], about)] : [])
      this.readout = Object.assign(document.createElement("div"), { className: "readout", hidden: true })
      const tools = Object.assign(document.createElement("div"), { className: "tools" })
      this.button(tools, "+", "Zoom in", () => this.closer(0.5))
      this.button(tools, "\u2212", "Zoom out", () => this.closer(2))
      this.reset = this.button(tools, "Reset", "Show all again", () => this.all())
      this.reset.hidden = true
      this.figure.append(this.readout, tools)
      svg.tabIndex = 0
      svg.addEventListener("pointermove", (event) => this.pointed(event))
      svg.addEventListener("pointerdown", (event) => this.pressed(event))
      svg.addEventListener("pointerup", (event) => this.released(event))
      svg.addEventListener("pointercancel", () => this.dropped())
      svg.addEventListener("pointerleave", () => this.hide())
      svg.addEventListener("dblclick", () => this.all())
      svg.addEventListener("blur", () => this.hide())
      svg.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key]
        if (by) (this.last ?? this.charts[0])?.move(by)
        else if (event.key === "Escape") this.all()
        else return
        event.preventDefault()
      })
    }
    button(parent, text, title, act) {
      const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, title })
      made.addEventListener("click", act)
      parent.append(made)
      return made
    }
    point(event) {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse())
      return [at.x, at.y]
    }
    pointed(event) {
      const point = this.point(event)
      if (this.begun) return this.drag(point)
      const chart = this.charts.find((c) => c.inside(point))
      if (!chart) return this.hide()
      if (this.last !== chart) this.hide()
      this.last = chart
      chart.show(point)
    }
    pressed(event) {
      this.pointed(event)
      const point = this.point(event), chart = this.charts.find((c) => c.inside(point))
      if (!chart || event.pointerType === "touch" || event.button) return  // touch scrolls the page
      this.begun = { chart, point }
      this.svg.setPointerCapture(event.pointerId)
      event.preventDefault()
    }
    corners(point) {
      const { chart, point: [x, y] } = this.begun, [left, top, right, bottom] = chart.about.box
      const xs = [x, clamp(point[0], left, right)].sort((a, b) => a - b)
      return [xs, chart.about.series ? [top, bottom] : [y, clamp(point[1], top, bottom)].sort((a, b) => a - b)]
    }
    drag(point) {
      const [[x0, x1], [y0, y1]] = this.corners(point), { frame } = this.begun.chart
      for (const [key, value] of Object.entries({ x: x0, y: y0, width: x1 - x0, height: y1 - y0 })) frame.setAttribute(key, value)
      frame.classList.toggle("shown", x1 - x0 > 4)
    }
    released(event) {
      if (!this.begun) return
      const { chart } = this.begun, [[x0, x1], [y0, y1]] = this.corners(this.point(event))
      this.dropped()
      if (x1 - x0 <= 4) return
      const [a, b] = chart.data([x0, y1]), [c, d] = chart.data([x1, y0])
      chart.zoom([a, c], [b, d])
      this.hide()
    }
    dropped() {
      this.begun?.chart.frame.classList.remove("shown")
      this.begun = null
    }
    closer(by) {
      const chart = this.last ?? this.charts[0], { limits, whole } = chart
      const about = chart.at === undefined ? (limits.x[0] + limits.x[1]) / 2 : chart.data([chart.at, 0])[0]
      const x = limits.x.map((v, i) => clamp(about + by * (v - about), ...(i ? [about, whole.x[1]] : [whole.x[0], about])))
      if (x[1] - x[0] >= whole.x[1] - whole.x[0]) chart.reset()
      else if (x[1] > x[0]) chart.zoom(x, limits.y)
      this.hide()
    }
    all() {
      for (const chart of this.charts) if (chart.moved) chart.reset()
      this.hide()
    }
    hide() {
      this.readout.hidden = true
      for (const chart of this.charts) chart.cursor.classList.remove("shown")
    }
    say({ title, rows, x }, svg, point) {
      const head = Object.assign(document.createElement("strong"), { textContent: title })
      this.readout.replaceChildren(head, ...rows.map(([name, value, color]) => {
        const row = document.createElement("div"), swatch = document.createElement("i"), label = document.createElement("span"), number = document.createElement("b")
        if (color) swatch.style.background = color
        else swatch.hidden = true
        label.textContent = name
        number.textContent = value
        row.append(swatch, label, number)
        return row
      }))
      this.readout.hidden = false
      // Beside the cursor, on the side with more room, and within the figure.
      const of = this.figure.getBoundingClientRect(), at = new DOMPoint(x, point[1]).matrixTransform(svg.getScreenCTM())
      const { offsetWidth: width, offsetHeight: height } = this.readout
      const left = at.x - of.left > of.width / 2 ? at.x - of.left - width - 12 : at.x - of.left + 12
      this.readout.style.left = `${clamp(left, 0, Math.max(0, of.width - width))}px`
      this.readout.style.top = `${Math.max(0, at.y - of.top - height / 2)}px`
    }
  }

  for (const svg of document.querySelectorAll("svg[data-readout]")) new View(svg)
})()
