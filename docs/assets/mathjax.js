// MathJax, on pages with formulas. pymdownx.arithmatex puts them between \( and \), or \[ and \], in elements of this class.
window.MathJax = {
  tex2jax: { ignoreClass: ".*", processClass: "arithmatex" },
  "HTML-CSS": {
    availableFonts: [], imageFont: null, preferredFont: null, webFont: "STIX-Web", // the only font that the package has
    styles: { "@font-face": { "font-family": "MathJax_Blank", src: "local('no font')" } }, // not the address about:blank
  },
  showMathMenu: false,
  messageStyle: "none",
};
if (document.querySelector(".arithmatex")) {
  const script = document.createElement("script");
  script.src = new URL("../mathjax/MathJax.js?config=TeX-AMS-MML_HTMLorMML-full", document.currentScript.src).href;
  document.head.append(script);
}
