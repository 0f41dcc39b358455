//! Ids of runs: the time of saving, and a few random digits.

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// Minimum length of an abbreviated id.
const MIN_PREFIX: usize = 2;

/// Id of a run: `YYYYMMDD-HHMMSSmmm-xxxxxx` in UTC. `mmm` are milliseconds, and `xxxxxx` are six
/// random hexadecimal digits. Ids sort by time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(String);

impl Id {
    /// Creates an id for the current time.
    pub(super) fn now() -> Self {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        // Every RandomState has different keys, also in a forked process.
        let random = RandomState::new().build_hasher().finish() & 0xff_ffff;
        let (seconds, ms) = (now.as_secs(), now.subsec_millis());
        Self(format!("{}{ms:03}-{random:06x}", stamp(seconds)))
    }

    /// Parses an id; `None` if the text is not one.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        let form = bytes.len() == 25
            && bytes.iter().enumerate().all(|(i, c)| match i {
                8 | 18 => *c == b'-',
                0..18 => c.is_ascii_digit(),
                _ => c.is_ascii_digit() || (b'a'..=b'f').contains(c),
            });
        form.then(|| Self(text.to_owned()))
    }

    /// Returns the id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the random digits, which users type.
    #[must_use]
    pub fn tail(&self) -> &str {
        &self.0[19..]
    }

    /// Returns the time of saving: `YYYY-MM-DDTHH:MM:SSZ`.
    #[must_use]
    pub fn created(&self) -> String {
        let t = &self.0;
        format!(
            "{}-{}-{}T{}:{}:{}Z",
            &t[..4],
            &t[4..6],
            &t[6..8],
            &t[9..11],
            &t[11..13],
            &t[13..15]
        )
    }

    /// Returns the day as `YYYYMMDD`. These texts sort by date.
    #[must_use]
    pub fn day(&self) -> &str {
        &self.0[..8]
    }

    /// Returns whether a text is a prefix of the id or of its random digits.
    pub(super) fn matches(&self, text: &str) -> bool {
        text.len() >= MIN_PREFIX && (self.0.starts_with(text) || self.tail().starts_with(text))
    }

    /// Returns whether a text could abbreviate an id.
    pub(super) fn could_be(text: &str) -> bool {
        let hex = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
        let dated = text.len() <= 25 && text.chars().all(|c| hex(c) || c == '-');
        dated && (text.len() <= 6 || text.starts_with(|c: char| c.is_ascii_digit()))
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the date `days_ago` days ago as `YYYYMMDD`; 0 is today (UTC).
#[must_use]
pub fn day(days_ago: u64) -> String {
    stamp(seconds().saturating_sub(days_ago.saturating_mul(86_400)))[..8].to_owned()
}

/// Returns the present time as `YYYY-MM-DD HH:MM UTC`.
#[must_use]
pub fn minute() -> String {
    let t = stamp(seconds());
    format!(
        "{}-{}-{} {}:{} UTC",
        &t[..4],
        &t[4..6],
        &t[6..8],
        &t[9..11],
        &t[11..13]
    )
}

/// Returns the seconds since 1970.
fn seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

/// Formats seconds since 1970 as `YYYYMMDD-HHMMSS` in UTC.
fn stamp(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    format!(
        "{year:04}{month:02}{day:02}-{:02}{:02}{:02}",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

/// Returns the date of a number of days since 1970. Days are counted in 400-year cycles from March
/// 1 of the year 0.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (cycle, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let (month, turn) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    (cycle * 400 + year + turn, month, of_month)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values come from `date -u -d @SECONDS +%Y%m%d-%H%M%S`.
    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(stamp(0), "19700101-000000");
        assert_eq!(stamp(951_782_399), "20000228-235959");
        assert_eq!(stamp(951_782_400), "20000229-000000");
        assert_eq!(stamp(1_795_185_295), "20261120-143455");
        assert_eq!(stamp(4_107_542_400), "21000301-000000");
    }

    #[test]
    fn ids_are_recognised() {
        let id = Id::now();
        assert_eq!(Id::parse(id.as_str()), Some(id.clone()));
        assert!(id.matches(id.tail()) && id.matches(&id.as_str()[..11]) && !id.matches("2"));
        let id = Id::parse("20261120-143455678-3f2a9c").unwrap();
        assert_eq!(id.created(), "2026-11-20T14:34:55Z");
        assert_eq!(Id::parse("20261120-143455678-3F2A9C"), None);
        assert_eq!(Id::parse("20261120_143455678-3f2a9c"), None);
        for (text, possible) in [
            ("3f2", true),
            ("20261120-14", true),
            ("main", false),
            ("before-fix", false),
        ] {
            assert_eq!(Id::could_be(text), possible, "{text}");
        }
    }
}
