//! Colors that are readable on their background and distinguishable for color-blind readers.

/// Number of series colors in each palette.
pub(crate) const SERIES: usize = 8;

/// The colors of one theme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Palette {
    /// Background of the page.
    pub ground: &'static str,
    /// Cards and table stripes.
    pub panel: &'static str,
    /// Text.
    pub ink: &'static str,
    /// Less important text, axes.
    pub faint: &'static str,
    /// Grid lines: decoration without sufficient contrast.
    pub grid: &'static str,
    /// Good results.
    pub good: &'static str,
    /// Bad results.
    pub bad: &'static str,
    /// Links, focus.
    pub link: &'static str,
    /// Series and kinds of work, in order of use.
    pub series: [&'static str; SERIES],
    /// Families of memory, from the bottom of the stack to the top. Their colors are muted, so
    /// that areas of memory look different from bars of work.
    pub memory: [&'static str; SERIES],
    /// The best cell of a heat map. Worse cells are paler; text is readable on all of them.
    pub heat: &'static str,
}

impl Palette {
    /// Dark on light, also for printing.
    pub const LIGHT: Self = Self {
        ground: "#ffffff",
        panel: "#f3f5f7",
        ink: "#16191d",
        faint: "#555d66",
        grid: "#d9dee3",
        good: "#00663d",
        bad: "#a8200d",
        link: "#0a55a0",
        series: [
            "#1a6df9", "#642101", "#622f8c", "#066040", "#8e7405", "#410532", "#343b46", "#45777c",
        ],
        memory: [
            "#0c5a93", "#138373", "#916cb2", "#c3783e", "#65240c", "#4b514b", "#879782", "#78661d",
        ],
        heat: "#3d94d1",
    };

    /// Light on dark.
    pub const DARK: Self = Self {
        ground: "#15181c",
        panel: "#1e2328",
        ink: "#e8ebee",
        faint: "#a3adb8",
        grid: "#353c44",
        good: "#5fd39b",
        bad: "#ff9a8a",
        link: "#8ec5ff",
        series: [
            "#4679fa", "#a4783a", "#b28be7", "#81fca2", "#fbcb2e", "#d65597", "#eeeef8", "#5fceee",
        ],
        memory: [
            "#5c76bf", "#0ba39b", "#d3b3fe", "#b0682b", "#fbac9f", "#676663", "#dde8cd", "#a69f4a",
        ],
        heat: "#2268a0",
    };

    /// Returns the names of the variables with the values of this palette.
    pub fn variables(&self) -> impl Iterator<Item = (String, &'static str)> {
        let named = [
            ("ground", self.ground),
            ("panel", self.panel),
            ("ink", self.ink),
            ("faint", self.faint),
            ("grid", self.grid),
            ("good", self.good),
            ("bad", self.bad),
            ("link", self.link),
            ("heat", self.heat),
        ];
        let named = named.into_iter().map(|(n, c)| (n.to_owned(), c));
        let series = self.series.into_iter().enumerate();
        let memory = self.memory.into_iter().enumerate();
        named
            .chain(series.map(|(i, c)| (format!("c{i}"), c)))
            .chain(memory.map(|(i, c)| (format!("m{i}"), c)))
    }

    /// Returns a drawing with every variable replaced by its value.
    #[must_use]
    pub(crate) fn fill_in(&self, svg: &str) -> String {
        self.variables()
            .fold(svg.to_owned(), |svg, (name, colour)| {
                svg.replace(&format!("var(--{name})"), colour)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linear(colour: &str) -> [f64; 3] {
        let part = |i: usize| {
            let c = f64::from(u8::from_str_radix(&colour[i..i + 2], 16).unwrap()) / 255.0;
            if c <= 0.04045 {
                c / 12.92
            } else {
                ((c + 0.055) / 1.055).powf(2.4)
            }
        };
        assert!(colour.len() == 7 && colour.starts_with('#'));
        [part(1), part(3), part(5)]
    }

    /// Returns the contrast ratio of WCAG 2.2.
    fn contrast(a: &str, b: &str) -> f64 {
        let luminance = |c: &str| {
            let [r, g, b] = linear(c);
            0.2126 * r + 0.7152 * g + 0.0722 * b
        };
        let (x, y) = (luminance(a), luminance(b));
        (x.max(y) + 0.05) / (x.min(y) + 0.05)
    }

    #[test]
    fn contrast_is_that_of_wcag() {
        assert!((contrast("#000000", "#ffffff") - 21.0).abs() < 1e-9);
        // The well-known grey that is just dark enough.
        assert!((contrast("#767676", "#ffffff") - 4.54).abs() < 0.005);
    }

    #[test]
    fn everything_that_carries_meaning_stands_out_from_its_ground() {
        for p in [Palette::LIGHT, Palette::DARK] {
            let text = [p.ink, p.faint, p.good, p.bad, p.link];
            for colour in text.into_iter().chain(p.series) {
                let ratio = contrast(colour, p.ground);
                assert!(ratio >= 4.5, "{colour} on {}: {ratio:.2}", p.ground);
            }
            for colour in text {
                let ratio = contrast(colour, p.panel);
                assert!(ratio >= 4.5, "{colour} on {}: {ratio:.2}", p.panel);
            }
            // Areas that have no text on them.
            for colour in p.memory {
                let ratio = contrast(colour, p.ground);
                assert!(ratio >= 3.0, "{colour} on {}: {ratio:.2}", p.ground);
            }
        }
    }

    /// Numbers are readable on every shade of a heat map, and darker (on dark pages: brighter)
    /// shades are distinguishable.
    #[test]
    fn numbers_are_readable_on_heat_maps() {
        let mixed = |a: &str, b: &str, share: f64| {
            let part = |c: &str, i: usize| f64::from(u8::from_str_radix(&c[i..i + 2], 16).unwrap());
            let mix = |i| (part(a, i) + share * (part(b, i) - part(a, i))).round() as u8;
            format!("#{:02x}{:02x}{:02x}", mix(1), mix(3), mix(5))
        };
        for p in [Palette::LIGHT, Palette::DARK] {
            let shades: Vec<String> = (0..=10)
                .map(|i| mixed(p.ground, p.heat, f64::from(i) / 10.0))
                .collect();
            for shade in &shades {
                let ratio = contrast(p.ink, shade);
                assert!(ratio >= 4.5, "{} on {shade}: {ratio:.2}", p.ink);
            }
            for pair in shades.windows(2) {
                let d = distance(oklab(linear(&pair[0])), oklab(linear(&pair[1])));
                assert!(d > 0.02, "{pair:?}: {d:.3}");
            }
        }
    }

    /// Simulations of full protanopia, deuteranopia and tritanopia by Machado, Oliveira and
    /// Fernandes (2009).
    const BLIND: [[[f64; 3]; 3]; 3] = [
        [
            [0.152_286, 1.052_583, -0.204_868],
            [0.114_503, 0.786_281, 0.099_216],
            [-0.003_882, -0.048_116, 1.051_998],
        ],
        [
            [0.367_322, 0.860_646, -0.227_968],
            [0.280_085, 0.672_501, 0.047_413],
            [-0.011_820, 0.042_940, 0.968_881],
        ],
        [
            [1.255_528, -0.076_749, -0.178_779],
            [-0.078_411, 0.930_809, 0.147_602],
            [0.004_733, 0.691_367, 0.303_900],
        ],
    ];

    /// Converts to Ottosson's Oklab, in which distance approximates perceived difference.
    fn oklab(rgb: [f64; 3]) -> [f64; 3] {
        let [r, g, b] = rgb.map(|x| x.clamp(0.0, 1.0));
        let l = (0.412_221_470_8 * r + 0.536_332_536_3 * g + 0.051_445_992_9 * b).cbrt();
        let m = (0.211_903_498_2 * r + 0.680_699_545_1 * g + 0.107_396_956_6 * b).cbrt();
        let s = (0.088_302_461_9 * r + 0.281_718_837_6 * g + 0.629_978_700_5 * b).cbrt();
        [
            0.210_454_255_3 * l + 0.793_617_785_0 * m - 0.004_072_046_8 * s,
            1.977_998_495_1 * l - 2.428_592_205_0 * m + 0.450_593_709_9 * s,
            0.025_904_037_1 * l + 0.782_771_766_2 * m - 0.808_675_766_0 * s,
        ]
    }

    fn distance(a: [f64; 3], b: [f64; 3]) -> f64 {
        a.iter()
            .zip(b)
            .map(|(x, y)| (x - y).powi(2))
            .sum::<f64>()
            .sqrt()
    }

    /// Checks that the colors differ from each other. A difference of 0.02 is just visible. With
    /// normal vision the colors must differ six times as much, with any color blindness four
    /// times.
    fn distinguishable(colours: &[&str]) {
        for (i, a) in colours.iter().enumerate() {
            for b in &colours[i + 1..] {
                let (x, y) = (linear(a), linear(b));
                let d = distance(oklab(x), oklab(y));
                assert!(d > 0.12, "{a} {b}: {d:.3}");
                for m in BLIND {
                    let seen = |c: [f64; 3]| {
                        oklab(m.map(|row| row.iter().zip(c).map(|(k, v)| k * v).sum()))
                    };
                    let d = distance(seen(x), seen(y));
                    assert!(d > 0.08, "{a} {b}: {d:.3}");
                }
            }
        }
    }

    #[test]
    fn colour_blind_readers_can_distinguish_kinds_of_work_and_of_memory() {
        for p in [Palette::LIGHT, Palette::DARK] {
            // Exposed time is drawn next to the kinds of work.
            let kinds: Vec<&str> = p.series.into_iter().chain([p.bad]).collect();
            distinguishable(&kinds);
            distinguishable(&p.memory);
        }
    }

    /// Work is saturated and memory is muted, so that they are not confused.
    #[test]
    fn memory_is_muted() {
        let chroma = |c: &&str| {
            let [_, a, b] = oklab(linear(c));
            a.hypot(b)
        };
        for p in [Palette::LIGHT, Palette::DARK] {
            let mean = |all: &[&str]| all.iter().map(chroma).sum::<f64>() / all.len() as f64;
            assert!(
                p.memory.iter().all(|c| chroma(c) <= 0.121),
                "{:?}",
                p.memory
            );
            let [work, memory] = [mean(&p.series), mean(&p.memory)];
            assert!(work > 1.2 * memory, "{work:.3} {memory:.3}");
        }
    }

    #[test]
    fn a_file_of_its_own_has_no_variables() {
        let svg = "<path fill=\"var(--c1)\" stroke=\"var(--ink)\"/>";
        let out = Palette::LIGHT.fill_in(svg);
        assert_eq!(out, "<path fill=\"#642101\" stroke=\"#16191d\"/>");
    }
}
