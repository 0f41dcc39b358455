//! One event of a trace as JSON, borrowed from the text.

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// Text that is borrowed unless it contains escapes.
pub(super) struct Text<'a>(pub(super) Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("text")
            }
            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        from.deserialize_str(Reader)
    }
}

/// The fields of an event. Numbers are kept as text until they are needed, because they may be
/// quoted. Arguments make up most of a trace, so they are read in the same pass.
#[derive(Default)]
pub(super) struct Event<'a> {
    pub(super) ph: Cow<'a, str>,
    pub(super) cat: Cow<'a, str>,
    pub(super) name: Cow<'a, str>,
    pub(super) pid: &'a str,
    pub(super) tid: &'a str,
    pub(super) ts: &'a str,
    pub(super) dur: &'a str,
    pub(super) id: &'a str,
    pub(super) args: Args<'a>,
}

/// Reads the known fields of an object. If a key occurs twice, the last one counts.
pub(super) trait Fields<'a>: Default {
    fn take<M: MapAccess<'a>>(&mut self, key: &str, from: &mut M) -> Result<bool, M::Error>;
}

struct Object<T>(T);

impl<'de, T: Fields<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reader<T>(T);
        impl<'de, T: Fields<'de>> Visitor<'de> for Reader<T> {
            type Value = T;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<T, M::Error> {
                fields(self.0, map)
            }
        }
        from.deserialize_map(Reader(T::default())).map(Object)
    }
}

fn fields<'de, T: Fields<'de>, M: MapAccess<'de>>(mut to: T, mut map: M) -> Result<T, M::Error> {
    while let Some(key) = map.next_key::<Text<'de>>()? {
        if !to.take(&key.0, &mut map)? {
            map.next_value::<IgnoredAny>()?;
        }
    }
    Ok(to)
}

/// Reads an object.
pub(super) fn read<'a, T: Fields<'a>>(text: &'a [u8]) -> serde_json::Result<T> {
    serde_json::from_slice::<Object<T>>(text).map(|o| o.0)
}

fn raw<'a, M: MapAccess<'a>>(from: &mut M) -> Result<&'a str, M::Error> {
    from.next_value::<&'a RawValue>().map(RawValue::get)
}

fn text<'a, M: MapAccess<'a>>(from: &mut M) -> Result<Cow<'a, str>, M::Error> {
    let raw = raw(from)?;
    Ok(match serde_json::from_str::<Text<'a>>(raw) {
        Ok(text) => text.0,
        Err(_) => Cow::Borrowed(raw),
    })
}

impl<'a> Fields<'a> for Event<'a> {
    fn take<M: MapAccess<'a>>(&mut self, key: &str, from: &mut M) -> Result<bool, M::Error> {
        match key {
            "ph" => self.ph = text(from)?,
            "cat" => self.cat = text(from)?,
            "name" => self.name = text(from)?,
            "pid" => self.pid = raw(from)?,
            "tid" => self.tid = raw(from)?,
            "ts" => self.ts = raw(from)?,
            "dur" => self.dur = raw(from)?,
            "id" => self.id = raw(from)?,
            "args" => self.args = from.next_value()?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// The arguments of an event; `None` if the value is not an object.
pub(super) struct Args<'a>(pub(super) Option<Arguments<'a>>);

impl Default for Args<'_> {
    fn default() -> Self {
        Self(Some(Arguments::default()))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Args<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Args<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("arguments")
            }
            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Args<'de>, M::Error> {
                fields(Arguments::default(), map).map(|a| Args(Some(a)))
            }
            fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<Args<'de>, S::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Args(None))
            }
            fn visit_unit<E: Error>(self) -> Result<Args<'de>, E> {
                Ok(Args(None))
            }
            fn visit_bool<E: Error>(self, _: bool) -> Result<Args<'de>, E> {
                Ok(Args(None))
            }
            fn visit_i64<E: Error>(self, _: i64) -> Result<Args<'de>, E> {
                Ok(Args(None))
            }
            fn visit_u64<E: Error>(self, _: u64) -> Result<Args<'de>, E> {
                Ok(Args(None))
            }
            fn visit_f64<E: Error>(self, _: f64) -> Result<Args<'de>, E> {
                Ok(Args(None))
            }
            fn visit_str<E: Error>(self, _: &str) -> Result<Args<'de>, E> {
                Ok(Args(None))
            }
        }
        from.deserialize_any(Reader)
    }
}

/// The relevant arguments of an event.
#[derive(Default)]
pub(super) struct Arguments<'a> {
    pub(super) external: &'a str,
    pub(super) correlation: &'a str,
    pub(super) stream: &'a str,
    pub(super) device: &'a str,
    pub(super) bytes: &'a str,
    pub(super) sequence: &'a str,
    pub(super) forward_thread: &'a str,
    pub(super) dims: &'a str,
    pub(super) types: &'a str,
    pub(super) concrete: &'a str,
    pub(super) collective: Cow<'a, str>,
    pub(super) elements_in: &'a str,
    pub(super) elements_out: &'a str,
    pub(super) group_size: &'a str,
    pub(super) dtype: Cow<'a, str>,
    pub(super) group: Cow<'a, str>,
    pub(super) group_about: Cow<'a, str>,
    pub(super) group_ranks: Cow<'a, str>,
    pub(super) allocated: &'a str,
    pub(super) reserved: &'a str,
    pub(super) memory_bytes: &'a str,
    pub(super) address: &'a str,
    pub(super) device_type: &'a str,
    pub(super) device_id: &'a str,
    pub(super) graph_node: &'a str,
}

impl<'a> Fields<'a> for Arguments<'a> {
    fn take<M: MapAccess<'a>>(&mut self, key: &str, from: &mut M) -> Result<bool, M::Error> {
        match key {
            "External id" | "external id" => self.external = raw(from)?,
            "correlation" => self.correlation = raw(from)?,
            "stream" => self.stream = raw(from)?,
            "device" => self.device = raw(from)?,
            "bytes" => self.bytes = raw(from)?,
            "Sequence number" => self.sequence = raw(from)?,
            "Fwd thread id" => self.forward_thread = raw(from)?,
            "Input Dims" | "Input dims" => self.dims = raw(from)?,
            "Input type" => self.types = raw(from)?,
            "Concrete Inputs" => self.concrete = raw(from)?,
            "Collective name" => self.collective = text(from)?,
            "In msg nelems" => self.elements_in = raw(from)?,
            "Out msg nelems" => self.elements_out = raw(from)?,
            "Group size" => self.group_size = raw(from)?,
            "dtype" => self.dtype = text(from)?,
            "Process Group Name" => self.group = text(from)?,
            "Process Group Description" => self.group_about = text(from)?,
            "Process Group Ranks" => self.group_ranks = text(from)?,
            "Total Allocated" => self.allocated = raw(from)?,
            "Total Reserved" => self.reserved = raw(from)?,
            "Bytes" => self.memory_bytes = raw(from)?,
            "Addr" => self.address = raw(from)?,
            "Device Type" => self.device_type = raw(from)?,
            "Device Id" => self.device_id = raw(from)?,
            "graph node id" => self.graph_node = raw(from)?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Parses a whole number, quoted or not; `None` for anything else.
pub(super) fn integer(raw: &str) -> Option<i64> {
    let digits = raw.trim_matches('"').trim();
    digits.parse().ok().or_else(|| {
        let (whole, rest) = digits.split_once('.')?;
        rest.bytes()
            .all(|b| b.is_ascii_digit())
            .then(|| whole.parse().ok())?
    })
}

/// Converts microseconds in decimal digits to nanoseconds; `None` for anything else.
pub(super) fn nanos(raw: &str) -> Option<i64> {
    let raw = raw.trim_matches('"').trim();
    let (negative, digits) = match raw.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, raw),
    };
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    let plain = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !plain(whole) || !plain(part) {
        // Exponents are rare, so this path may be slow.
        let us: f64 = raw.parse().ok()?;
        return (us.is_finite() && us.abs() < 9e15).then_some((us * 1e3).round() as i64);
    }
    let us: i64 = whole.parse().ok()?;
    let digit = |i: usize| i64::from(part.as_bytes().get(i).map_or(0, |b| b - b'0'));
    let rest = digit(0) * 100 + digit(1) * 10 + digit(2) + i64::from(digit(3) >= 5);
    let ns = us.checked_mul(1000)?.checked_add(rest)?;
    Some(if negative { -ns } else { ns })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_keep_their_nanoseconds() {
        for (text, expected) in [
            ("4761385773249.856", Some(4_761_385_773_249_856)),
            ("12", Some(12_000)),
            ("1.5", Some(1500)),
            ("0.0015", Some(2)),
            ("-3.25", Some(-3250)),
            ("\"7\"", Some(7000)),
            ("1e3", Some(1_000_000)),
            ("", None),
            ("null", None),
            ("1.2.3", None),
        ] {
            assert_eq!(nanos(text), expected, "{text}");
        }
    }

    #[test]
    fn an_event_is_read_whatever_the_type_of_its_fields() {
        let text =
            br#"{"ph": "X", "name": "a\"b", "pid": "Spans", "tid": 7, "ts": "12", "other": [1],
            "args": {"External id": "5", "External id": 6, "correlation": 9.0}}"#;
        let event: Event<'_> = read(text).unwrap();
        assert_eq!(
            (&*event.ph, &*event.name, event.pid),
            ("X", "a\"b", "\"Spans\"")
        );
        let arguments = event.args.0.unwrap();
        assert_eq!(integer(arguments.external), Some(6));
        assert_eq!(integer(arguments.correlation), Some(9));
        assert!(read::<Event<'_>>(b"{\"ph\": }").is_err());
        assert!(read::<Event<'_>>(b"[]").is_err());
        for (args, is_object) in [
            ("{}", true),
            ("[1]", false),
            ("\"a\"", false),
            ("null", false),
            ("7", false),
        ] {
            let text = format!(r#"{{"args": {args}, "ph": "X"}}"#);
            let event: Event<'_> = read(text.as_bytes()).unwrap();
            assert_eq!(
                (&*event.ph, event.args.0.is_some()),
                ("X", is_object),
                "{args}"
            );
        }
    }
}
