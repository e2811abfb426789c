// Hands the user a file: {name, type} and its content. Put before the scripts that do.

function download({ name, type }, data) {
  const url = URL.createObjectURL(new Blob([data], { type }));
  const link = document.createElement("a");
  Object.assign(link, { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
