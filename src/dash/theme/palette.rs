//! Colours of the themes, and their substitutes on terminals with fewer colours.

use ratatui::style::Color;

pub(super) type Rgb = (u8, u8, u8);

pub(super) struct Palette {
    pub(super) text: Rgb,
    pub(super) dim: Rgb,
    pub(super) accent: Rgb,
    pub(super) good: Rgb,
    pub(super) bad: Rgb,
    pub(super) warn: Rgb,
    pub(super) select: Rgb,
    /// Colours of the kinds of work, in their order.
    pub(super) work: [Rgb; 9],
    /// Colours of the causes of exposed time, in their order.
    pub(super) cause: [Rgb; 7],
}

pub(super) const DARK: Palette = Palette {
    text: (220, 223, 228),
    dim: (128, 136, 148),
    accent: (97, 175, 239),
    good: (126, 199, 121),
    bad: (240, 113, 120),
    warn: (229, 192, 123),
    select: (52, 62, 80),
    work: [
        (86, 156, 214),
        (78, 201, 176),
        (120, 140, 170),
        (150, 120, 100),
        (197, 134, 192),
        (229, 192, 123),
        (224, 132, 86),
        (235, 160, 160),
        (200, 200, 120),
    ],
    cause: [
        (235, 203, 100),
        (240, 113, 120),
        (120, 200, 130),
        (220, 130, 60),
        (197, 134, 192),
        (128, 136, 148),
        (110, 200, 220),
    ],
};

pub(super) const LIGHT: Palette = Palette {
    text: (40, 44, 52),
    dim: (120, 125, 133),
    accent: (0, 92, 197),
    good: (20, 120, 50),
    bad: (190, 30, 45),
    warn: (150, 95, 0),
    select: (208, 224, 245),
    work: [
        (66, 120, 200),
        (20, 150, 130),
        (150, 160, 180),
        (170, 130, 100),
        (160, 80, 160),
        (200, 150, 30),
        (205, 95, 40),
        (215, 100, 110),
        (140, 140, 50),
    ],
    cause: [
        (180, 140, 0),
        (200, 40, 50),
        (40, 130, 60),
        (205, 95, 20),
        (150, 70, 150),
        (120, 125, 133),
        (20, 130, 160),
    ],
};

/// The eight colours of Okabe and Ito, with grey instead of black on dark backgrounds.
pub(super) const SAFE: Palette = Palette {
    text: (225, 225, 225),
    dim: (140, 140, 140),
    accent: (86, 180, 233),
    good: (86, 180, 233),
    bad: (213, 94, 0),
    warn: (240, 228, 66),
    select: (60, 60, 75),
    work: [
        (0, 114, 178),
        (0, 158, 115),
        (130, 130, 130),
        (170, 170, 170),
        (204, 121, 167),
        (230, 159, 0),
        (213, 94, 0),
        (240, 228, 66),
        (86, 180, 233),
    ],
    cause: [
        (240, 228, 66),
        (213, 94, 0),
        (0, 158, 115),
        (230, 159, 0),
        (204, 121, 167),
        (140, 140, 140),
        (86, 180, 233),
    ],
};

pub(super) fn luminance((r, g, b): Rgb) -> f64 {
    0.299 * f64::from(r) + 0.587 * f64::from(g) + 0.114 * f64::from(b)
}

/// Returns the closest colour of the 256-colour palette: its 6 × 6 × 6 cube, or its greys.
pub(super) fn indexed((r, g, b): Rgb) -> u8 {
    const STEPS: [u8; 6] = [0, 95, 135, 175, 215, 255];
    let near = |v: u8| (0..6).min_by_key(|&i| STEPS[i].abs_diff(v)).unwrap_or(0);
    let distance = |(x, y, z): Rgb| {
        let d = |a: u8, b: u8| u32::from(a.abs_diff(b)).pow(2);
        d(x, r) + d(y, g) + d(z, b)
    };
    let (i, j, k) = (near(r), near(g), near(b));
    let cube = (STEPS[i], STEPS[j], STEPS[k]);
    let mean = (u32::from(r) + u32::from(g) + u32::from(b)) / 3;
    let step = (mean.saturating_sub(3) / 10).min(23) as u8;
    let grey = 8 + 10 * step;
    if distance((grey, grey, grey)) < distance(cube) {
        232 + step
    } else {
        (16 + 36 * i + 6 * j + k) as u8
    }
}

pub(super) fn sixteen(rgb: Rgb) -> Color {
    const ALL: [(Rgb, Color); 14] = [
        ((0, 0, 0), Color::Black),
        ((190, 40, 40), Color::Red),
        ((40, 150, 40), Color::Green),
        ((190, 140, 0), Color::Yellow),
        ((50, 90, 190), Color::Blue),
        ((170, 70, 170), Color::Magenta),
        ((30, 150, 160), Color::Cyan),
        ((190, 190, 190), Color::Gray),
        ((120, 120, 120), Color::DarkGray),
        ((250, 110, 110), Color::LightRed),
        ((120, 220, 120), Color::LightGreen),
        ((240, 220, 110), Color::LightYellow),
        ((100, 170, 250), Color::LightBlue),
        ((230, 230, 230), Color::White),
    ];
    let distance = |(x, y, z): Rgb| {
        let d = |a: u8, b: u8| u32::from(a.abs_diff(b)).pow(2);
        d(x, rgb.0) + d(y, rgb.1) + d(z, rgb.2)
    };
    ALL.into_iter()
        .min_by_key(|(c, _)| distance(*c))
        .map_or(Color::Reset, |(_, c)| c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn palette_colours_are_the_nearest() {
        assert_eq!(indexed((0, 0, 0)), 16);
        assert_eq!(indexed((255, 0, 0)), 196);
        assert_eq!(indexed((128, 128, 128)), 244);
    }
}
