// The search takes hyphens before a word for "without this word". Those of an option, as in --gpus, mean nothing to it.
document.addEventListener("input", ({ target }) => {
  if (target.dataset.mdComponent === "search-query") {
    target.value = target.value.replace(/(^|\s)--+/g, "$1");
  }
}, true);
