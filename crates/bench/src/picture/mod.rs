//! Pictures as SVG. [`Picture`] draws rectangles, lines and text; `chart` draws bars and lines over
//! a scale with it.

pub(crate) mod chart;

use svg::Document;
use svg::node::element::{Element, Line, Rectangle, Title};
use svg::node::{Node, Text};

/// A picture under construction. Places and sizes are in pixels, from the upper left corner.
#[derive(Clone, Debug)]
pub struct Picture(Document);

/// How a text lies at its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// It begins there.
    Start,
    /// It is centred there.
    Middle,
    /// It ends there.
    End,
}

/// Size and colour of a text.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Font size in pixels.
    pub size: f64,
    /// Colour, such as `#1f2933`.
    pub colour: &'static str,
}

impl Picture {
    /// A white picture.
    #[must_use]
    pub fn new(width: f64, height: f64) -> Self {
        let document = Document::new()
            .set("viewBox", (0.0, 0.0, width, height))
            .set("width", width)
            .set("height", height)
            .set("font-family", "Helvetica, Arial, sans-serif");
        let mut picture = Self(document);
        picture.rectangle((0.0, 0.0), (width, height), "#ffffff", None);
        picture
    }

    /// Adds a rectangle: its upper left corner, its width and height, and a title that viewers show
    /// for it.
    pub fn rectangle(
        &mut self,
        at: (f64, f64),
        size: (f64, f64),
        colour: &str,
        title: Option<&str>,
    ) {
        let mut rectangle = Rectangle::new()
            .set("x", rounded(at.0))
            .set("y", rounded(at.1))
            .set("width", rounded(size.0))
            .set("height", rounded(size.1))
            .set("fill", colour);
        if let Some(title) = title {
            rectangle = rectangle.add(Title::new(printable(title)));
        }
        self.0.append(rectangle);
    }

    /// Adds a line.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: &str, width: f64) {
        let line = Line::new()
            .set("x1", rounded(from.0))
            .set("y1", rounded(from.1))
            .set("x2", rounded(to.0))
            .set("y2", rounded(to.1))
            .set("stroke", colour)
            .set("stroke-width", width);
        self.0.append(line);
    }

    /// Adds a text whose base line is at a place.
    pub fn text(&mut self, at: (f64, f64), style: Style, anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        // The crate's own text element puts its content between line feeds, which some viewers show
        // as spaces.
        let mut element = Element::new("text");
        element.assign("x", rounded(at.0));
        element.assign("y", rounded(at.1));
        element.assign("font-size", style.size);
        element.assign("fill", style.colour);
        element.assign("text-anchor", anchor);
        element.append(Text::new(printable(text)));
        self.0.append(element);
    }

    /// The picture as an SVG document.
    #[must_use]
    pub fn into_svg(self) -> String {
        format!("{}\n", self.0)
    }
}

/// A hundredth of a pixel is exact enough.
fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// XML cannot represent control characters.
fn printable(text: &str) -> String {
    text.replace(|c: char| c.is_control(), " ")
}
