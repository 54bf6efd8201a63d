// Formulas stand between \( and \), or \[ and \], in elements of this class: pymdownx.arithmatex puts them there.
window.MathJax = {
  tex2jax: { ignoreClass: ".*", processClass: "arithmatex" },
  showMathMenu: false,
  messageStyle: "none",
};
