//! Colours and glyphs. Colour alone never carries meaning: kinds of work have textures, and states
//! have marks.

mod palette;

use crate::analysis::spans::Work;
use palette::{DARK, LIGHT, Palette, Rgb, SAFE, indexed, luminance, sixteen};
use ratatui::style::{Color, Modifier, Style};
use shardlab_plan::record::Cause;

/// Number of colours of the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// No colours, because there are none or the user does not want them.
    None,
    /// The basic sixteen colours.
    Sixteen,
    /// A palette of 256 colours.
    Palette,
    /// 24-bit colours.
    True,
}

impl Depth {
    /// Returns the depth according to the environment, given a lookup of variables.
    #[must_use]
    pub fn of(var: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name| var(name).filter(|v| !v.is_empty());
        if set("NO_COLOR").is_some() {
            return Self::None;
        }
        if set("COLORTERM").is_some_and(|v| v == "truecolor" || v == "24bit") {
            return Self::True;
        }
        match set("TERM") {
            Some(t) if t.contains("256") || t.contains("kitty") || t.contains("alacritty") => {
                Self::Palette
            }
            Some(t) if t == "dumb" || t.ends_with("-m") || t.starts_with("vt") => Self::None,
            _ => Self::Sixteen,
        }
    }
}

/// Name of a theme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// For dark terminals.
    Dark,
    /// For light terminals.
    Light,
    /// Colours that colour-blind people can distinguish (Okabe and Ito), with textures.
    Safe,
    /// No colours.
    Mono,
}

impl Name {
    /// All themes, in the order in which the key cycles through them.
    pub const ALL: [Self; 4] = [Self::Dark, Self::Light, Self::Safe, Self::Mono];

    /// Returns the spelling in options and in the saved state.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Dark => "dark",
            Self::Light => "light",
            Self::Safe => "safe",
            Self::Mono => "mono",
        }
    }

    /// Returns the theme with this name.
    #[must_use]
    pub fn find(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|n| n.text() == text)
    }
}

/// Colours and glyphs of the dashboard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Theme {
    /// Name.
    pub name: Name,
    /// Number of colours of the terminal.
    pub depth: Depth,
}

impl Theme {
    /// Creates a theme. Without colours there is only one.
    #[must_use]
    pub fn new(name: Name, depth: Depth) -> Self {
        let name = if depth == Depth::None {
            Name::Mono
        } else {
            name
        };
        Self { name, depth }
    }

    /// Returns the next theme.
    #[must_use]
    pub fn next(self) -> Self {
        let at = Name::ALL.iter().position(|n| *n == self.name).unwrap_or(0);
        Self::new(Name::ALL[(at + 1) % Name::ALL.len()], self.depth)
    }

    fn palette(self) -> Option<&'static Palette> {
        match self.name {
            Name::Dark => Some(&DARK),
            Name::Light => Some(&LIGHT),
            Name::Safe => Some(&SAFE),
            Name::Mono => None,
        }
    }

    fn colour(self, rgb: Rgb) -> Color {
        match self.depth {
            Depth::None => Color::Reset,
            Depth::Sixteen => sixteen(rgb),
            Depth::Palette => Color::Indexed(indexed(rgb)),
            Depth::True => Color::Rgb(rgb.0, rgb.1, rgb.2),
        }
    }

    fn fg(self, pick: impl Fn(&Palette) -> Rgb) -> Style {
        self.palette()
            .map_or_else(Style::new, |p| Style::new().fg(self.colour(pick(p))))
    }

    /// Returns whether kinds of work are drawn with textures as well.
    #[must_use]
    pub(crate) fn textures(self) -> bool {
        matches!(self.name, Name::Safe | Name::Mono)
    }

    /// Returns the style of plain text.
    #[must_use]
    pub fn text(self) -> Style {
        self.fg(|p| p.text)
    }

    /// Returns the style of less important text.
    #[must_use]
    pub fn dim(self) -> Style {
        match self.palette() {
            Some(_) => self.fg(|p| p.dim),
            None => Style::new().add_modifier(Modifier::DIM),
        }
    }

    /// Returns the style of headings, focus and keys.
    #[must_use]
    pub(crate) fn accent(self) -> Style {
        self.fg(|p| p.accent).add_modifier(Modifier::BOLD)
    }

    /// Returns the style of bold text.
    #[must_use]
    pub fn strong(self) -> Style {
        self.text().add_modifier(Modifier::BOLD)
    }

    /// Returns the style of better or valid values.
    #[must_use]
    pub fn good(self) -> Style {
        self.fg(|p| p.good)
    }

    /// Returns the style of worse or failed values.
    #[must_use]
    pub fn bad(self) -> Style {
        self.fg(|p| p.bad).add_modifier(Modifier::BOLD)
    }

    /// Returns the style of changed values and cautions.
    #[must_use]
    pub fn warn(self) -> Style {
        self.fg(|p| p.warn)
    }

    /// Returns the style of the selected row in the focused pane.
    #[must_use]
    pub(crate) fn selected(self) -> Style {
        match self.palette() {
            Some(p) if self.depth > Depth::Sixteen => Style::new()
                .bg(self.colour(p.select))
                .add_modifier(Modifier::BOLD),
            _ => Style::new().add_modifier(Modifier::REVERSED),
        }
    }

    /// Returns the style of the selected row in another pane.
    #[must_use]
    pub(crate) fn selected_elsewhere(self) -> Style {
        Style::new().add_modifier(Modifier::UNDERLINED)
    }

    /// Returns the style of a border, for the focused pane or another.
    #[must_use]
    pub(crate) fn border(self, focused: bool) -> Style {
        if focused {
            self.fg(|p| p.accent)
        } else {
            self.dim()
        }
    }

    /// Returns the foreground colour of a kind of work.
    #[must_use]
    pub fn work(self, work: Work) -> Style {
        self.fg(|p| p.work[work_index(work)])
    }

    /// Returns the style of text on a bar of a kind of work.
    #[must_use]
    pub(crate) fn on_work(self, work: Work) -> Style {
        match self.palette() {
            Some(p) => {
                let rgb = p.work[work_index(work)];
                let ink = if luminance(rgb) > 110.0 {
                    (16, 18, 22)
                } else {
                    (245, 245, 245)
                };
                Style::new().bg(self.colour(rgb)).fg(self.colour(ink))
            }
            None => Style::new().add_modifier(Modifier::REVERSED),
        }
    }

    /// Returns the glyph that fills a bar.
    #[must_use]
    pub(crate) fn texture(self, work: Work) -> char {
        if self.textures() {
            texture(work)
        } else {
            '█'
        }
    }

    /// Returns the colour of a cause of exposed time.
    #[must_use]
    pub fn cause(self, cause: Cause) -> Style {
        self.fg(|p| p.cause[cause as usize])
            .add_modifier(Modifier::BOLD)
    }

    /// Returns the colour of the n-th of many series.
    #[must_use]
    pub fn series(self, n: usize) -> Style {
        self.fg(|p| p.work[n % p.work.len()])
    }
}

fn work_index(work: Work) -> usize {
    match work {
        Work::Gemm => 0,
        Work::Attention => 1,
        Work::Memory => 2,
        Work::Copy => 3,
        Work::Optimizer => 4,
        Work::AllGather => 5,
        Work::ReduceScatter => 6,
        Work::AllReduce => 7,
        Work::OtherCollective => 8,
    }
}

/// Returns the fill of a bar for themes in which colours are not enough.
#[must_use]
pub(crate) const fn texture(work: Work) -> char {
    match work {
        Work::Gemm => '█',
        Work::Attention => '▓',
        Work::Memory => '▒',
        Work::Copy => '░',
        Work::Optimizer => '▚',
        Work::AllGather => '=',
        Work::ReduceScatter => '#',
        Work::AllReduce => '%',
        Work::OtherCollective => '+',
    }
}

/// Returns the letter of a cause of exposed time.
#[must_use]
pub const fn letter(cause: Cause) -> char {
    match cause {
        Cause::Host => 'H',
        Cause::Gate => 'G',
        Cause::Queue => 'Q',
        Cause::Wire => 'W',
        Cause::Contention => 'C',
        Cause::Tail => 'T',
        Cause::Straggler => 'S',
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const WORK: [Work; 9] = [
        Work::Gemm,
        Work::Attention,
        Work::Memory,
        Work::Copy,
        Work::Optimizer,
        Work::AllGather,
        Work::ReduceScatter,
        Work::AllReduce,
        Work::OtherCollective,
    ];

    #[test]
    fn the_ladder_goes_by_the_environment() {
        let depth = |vars: &[(&str, &str)]| {
            Depth::of(|name| {
                vars.iter()
                    .find(|(n, _)| *n == name)
                    .map(|(_, v)| (*v).to_owned())
            })
        };
        assert_eq!(depth(&[("COLORTERM", "truecolor")]), Depth::True);
        assert_eq!(
            depth(&[("COLORTERM", "truecolor"), ("NO_COLOR", "1")]),
            Depth::None
        );
        assert_eq!(
            depth(&[("NO_COLOR", ""), ("TERM", "xterm-256color")]),
            Depth::Palette
        );
        assert_eq!(depth(&[("TERM", "xterm")]), Depth::Sixteen);
        assert_eq!(depth(&[("TERM", "vt100")]), Depth::None);
    }

    #[test]
    fn without_colour_there_is_one_theme_and_it_has_no_colour() {
        for name in Name::ALL {
            let theme = Theme::new(name, Depth::None);
            assert_eq!(theme.name, Name::Mono);
            assert_eq!(theme.next().name, Name::Mono);
            for work in WORK {
                assert_eq!(theme.work(work).fg, None);
                assert_eq!(theme.on_work(work).bg, None);
            }
        }
    }

    #[test]
    fn kinds_differ_in_texture_and_in_colour() {
        let textures: BTreeSet<char> = WORK.iter().map(|w| texture(*w)).collect();
        assert_eq!(textures.len(), WORK.len());
        for name in [Name::Dark, Name::Light, Name::Safe] {
            let theme = Theme::new(name, Depth::True);
            let colours: BTreeSet<String> = WORK
                .iter()
                .map(|w| format!("{:?}", theme.work(*w).fg))
                .collect();
            assert_eq!(colours.len(), WORK.len(), "{name:?}");
        }
    }
}
