"""PDF files for tests, written by hand."""

from __future__ import annotations

from collections.abc import Sequence


def pdf(pages: Sequence[str]) -> bytes:
    """Returns a PDF file with one line of ASCII text on each page."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        content = f"BT /F1 12 Tf 50 700 Td ({text}) Tj ET" if text else ""
        resources = "<< /Font << /F1 3 0 R >> >>"
        page = f"/Parent 2 0 R /MediaBox [0 0 595 842] /Resources {resources} /Contents {5 + 2 * number} 0 R"
        objects += [f"<< /Type /Page {page} >>", f"<< /Length {len(content)} >>\nstream\n{content}\nendstream"]
    data, offsets = b"%PDF-1.4\n", list[int]()
    for number, content in enumerate(objects, start=1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{content}\nendobj\n".encode()
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    trailer = f"trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + f"xref\n0 {size}\n0000000000 65535 f \n{table}{trailer}".encode()
