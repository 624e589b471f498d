"use strict";
(() => {
  const form = document.querySelector(".filter");
  if (!form) return;
  const find = document.getElementById("find");
  const wrong = document.getElementById("wrong");
  const found = document.getElementById("found");
  const targets = [...document.querySelectorAll("article.target")];
  const update = () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const target of targets) {
      const text = target.dataset.words;
      const show = words.every((word) => text.includes(word)) && !(wrong && wrong.checked && !("wrong" in target.dataset));
      target.hidden = !show;
      count += show;
    }
    const all = count === targets.length;
    found.textContent = all ? `${count} targets` : `${count} of ${targets.length} targets`;
  };
  let waiting = 0;
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(update, 80);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  // A link to a target that the filter hides shows everything again.
  addEventListener("hashchange", () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target && target.hidden) {
      find.value = "";
      if (wrong) wrong.checked = false;
      update();
      target.scrollIntoView();
    }
  });
  form.hidden = false;
  update();
})();
