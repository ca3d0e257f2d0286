// The page: theme, figures that follow the width, tables that sort.

const figures = JSON.parse(document.getElementById("data").textContent);
const charts = [];

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").textContent = dark ? "Light" : "Dark";
}
const system = matchMedia("(prefers-color-scheme: dark)");
setTheme(system.matches);
system.addEventListener("change", () => setTheme(system.matches));
const isDark = () => document.documentElement.dataset.theme === "dark";
document.getElementById("theme").addEventListener("click", () => setTheme(!isDark()));

// Paper is white; a figure is drawn for the width it has there.
let before = false;
const PAPER = { wide: 690, half: 334 };
const onScreen = box => Math.floor(box.clientWidth), onPaper = box => (box.clientWidth ? (box.closest(".wide") ? PAPER.wide : PAPER.half) : 0);
let widthOf = onScreen;
addEventListener("beforeprint", () => { before = isDark(); setTheme(false); widthOf = onPaper; fit(); });
addEventListener("afterprint", () => { setTheme(before); widthOf = onScreen; fit(); });

function fit() {
  for (const chart of charts) {
    const width = widthOf(chart.box);
    if (width && width !== chart.width) chart.draw(width);
  }
}

for (const box of document.querySelectorAll(".plot")) {
  const figure = figures[box.dataset.figure];
  charts.push(new (figure.rows ? RowChart : Chart)(box, figure));
}
fit();
const observer = new ResizeObserver(fit);
for (const chart of charts) observer.observe(chart.box);

function sortBy(table, column) {
  const heads = [...table.tHead.rows[0].cells], head = heads[column], body = table.tBodies[0];
  const text = head.classList.contains("text"), first = text ? "ascending" : "descending", second = text ? "descending" : "ascending";
  const order = head.ariaSort === first ? second : first, sign = order === "ascending" ? 1 : -1;
  const value = row => row.cells[column].dataset.value;
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === ""); // nothing comes last in both directions
    return sign * (text ? x.localeCompare(y, "en", { numeric: true }) : Number(x) - Number(y));
  };
  body.append(...[...body.rows].sort(compare));
  heads.forEach(cell => { cell.ariaSort = cell === head ? order : "none"; });
}
for (const table of document.querySelectorAll("table"))
  [...table.tHead.rows[0].cells].forEach((head, column) => head.querySelector("button").addEventListener("click", () => sortBy(table, column)));
document.documentElement.dataset.ready = "true";
