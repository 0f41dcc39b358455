//! A serde serializer that hashes. Values are written as bytes of a fixed size, and lengths and
//! variants before what they apply to.
//!
//! The encoding is injective for values of one type, which is sufficient for a digest, because it
//! is never decoded. Field and variant names are left out, so they may be renamed without changing
//! digests.

use serde::Serialize;
use serde::ser;
use std::fmt;

/// Bytes collected before they are hashed, enough for the hash to process many chunks at once.
const BLOCK: usize = 1 << 16;

/// Hash of everything that is serialized into it.
pub(super) struct Hash {
    hasher: blake3::Hasher,
    pending: Vec<u8>,
}

impl Default for Hash {
    fn default() -> Self {
        Self {
            hasher: blake3::Hasher::new(),
            pending: Vec::with_capacity(BLOCK + 64),
        }
    }
}

impl Hash {
    pub(super) fn finish(mut self) -> blake3::Hash {
        self.hasher.update(&self.pending);
        self.hasher.finalize()
    }

    #[inline]
    fn put<const N: usize>(&mut self, bytes: [u8; N]) {
        self.pending.extend_from_slice(&bytes);
        if self.pending.len() >= BLOCK {
            self.flush();
        }
    }

    #[cold]
    fn flush(&mut self) {
        self.hasher.update(&self.pending);
        self.pending.clear();
    }

    fn long(&mut self, bytes: &[u8]) {
        self.put((bytes.len() as u64).to_le_bytes());
        self.flush();
        self.hasher.update(bytes);
    }
}

/// A value that the encoding does not support.
#[derive(Debug)]
pub(super) struct Unsupported(String);

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unsupported {}

impl ser::Error for Unsupported {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self(message.to_string())
    }
}

type Done = Result<(), Unsupported>;

macro_rules! fixed {
    ($($name:ident: $t:ty),*) => {
        $(
            #[inline]
            fn $name(self, v: $t) -> Done {
                self.put(v.to_le_bytes());
                Ok(())
            }
        )*
    };
}

impl ser::Serializer for &mut Hash {
    type Ok = ();
    type Error = Unsupported;
    type SerializeSeq = Self;
    type SerializeTuple = Self;
    type SerializeTupleStruct = Self;
    type SerializeTupleVariant = Self;
    type SerializeMap = Self;
    type SerializeStruct = Self;
    type SerializeStructVariant = Self;

    fixed!(
        serialize_i8: i8, serialize_i16: i16, serialize_i32: i32, serialize_i64: i64, serialize_i128: i128,
        serialize_u8: u8, serialize_u16: u16, serialize_u32: u32, serialize_u64: u64, serialize_u128: u128
    );

    fn serialize_bool(self, v: bool) -> Done {
        self.serialize_u8(u8::from(v))
    }

    fn serialize_f32(self, v: f32) -> Done {
        self.serialize_u32(v.to_bits())
    }

    fn serialize_f64(self, v: f64) -> Done {
        self.serialize_u64(v.to_bits())
    }

    fn serialize_char(self, v: char) -> Done {
        self.serialize_u32(v.into())
    }

    fn serialize_str(self, v: &str) -> Done {
        self.serialize_bytes(v.as_bytes())
    }

    fn serialize_bytes(self, v: &[u8]) -> Done {
        if v.len() >= BLOCK {
            self.long(v);
        } else {
            self.put((v.len() as u64).to_le_bytes());
            self.pending.extend_from_slice(v);
        }
        Ok(())
    }

    fn serialize_none(self) -> Done {
        self.serialize_u8(0)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, v: &T) -> Done {
        self.put([1]);
        v.serialize(self)
    }

    fn serialize_unit(self) -> Done {
        Ok(())
    }

    fn serialize_unit_struct(self, _: &'static str) -> Done {
        Ok(())
    }

    #[inline]
    fn serialize_unit_variant(self, _: &'static str, variant: u32, _: &'static str) -> Done {
        self.serialize_u16(variant as u16)
    }

    #[inline]
    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, v: &T) -> Done {
        v.serialize(self)
    }

    #[inline]
    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        variant: u32,
        _: &'static str,
        v: &T,
    ) -> Done {
        self.put((variant as u16).to_le_bytes());
        v.serialize(self)
    }

    fn serialize_seq(self, len: Option<usize>) -> Result<Self, Unsupported> {
        let len = len.ok_or_else(|| Unsupported("a sequence of unknown length".to_owned()))?;
        self.put((len as u64).to_le_bytes());
        Ok(self)
    }

    fn serialize_tuple(self, _: usize) -> Result<Self, Unsupported> {
        Ok(self)
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Self, Unsupported> {
        Ok(self)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        variant: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self, Unsupported> {
        self.put((variant as u16).to_le_bytes());
        Ok(self)
    }

    fn serialize_map(self, len: Option<usize>) -> Result<Self, Unsupported> {
        self.serialize_seq(len)
    }

    #[inline]
    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Self, Unsupported> {
        Ok(self)
    }

    #[inline]
    fn serialize_struct_variant(
        self,
        _: &'static str,
        variant: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Self, Unsupported> {
        self.put((variant as u16).to_le_bytes());
        Ok(self)
    }

    fn is_human_readable(&self) -> bool {
        false
    }
}

macro_rules! compound {
    ($($trait:ident: $($method:ident $(($key:ty))?),*;)*) => {
        $(
            impl ser::$trait for &mut Hash {
                type Ok = ();
                type Error = Unsupported;
                $(
                    #[inline]
                    fn $method<T: Serialize + ?Sized>(&mut self, $(_: $key,)? v: &T) -> Done {
                        v.serialize(&mut **self)
                    }
                )*
                #[inline]
                fn end(self) -> Done {
                    Ok(())
                }
            }
        )*
    };
}

compound! {
    SerializeSeq: serialize_element;
    SerializeTuple: serialize_element;
    SerializeTupleStruct: serialize_field;
    SerializeTupleVariant: serialize_field;
    SerializeMap: serialize_key, serialize_value;
    SerializeStruct: serialize_field (&'static str);
    SerializeStructVariant: serialize_field (&'static str);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash<T: Serialize + ?Sized>(v: &T) -> blake3::Hash {
        let mut h = Hash::default();
        v.serialize(&mut h).unwrap();
        h.finish()
    }

    #[derive(Serialize)]
    enum Shape {
        Unit,
        One(u8),
        Two(u8, u8),
        Named { a: u8 },
    }

    #[test]
    fn the_encoding_is_the_documented_one() {
        let bytes = [
            3u8, 0, 0, 0, 0, 0, 0, 0, b'a', b'b', b'c', 1, 5, 0, 2, 0, 7, 8,
        ];
        assert_eq!(
            hash(&("abc", Some(5u16), Shape::Two(7, 8))),
            blake3::hash(&bytes)
        );
    }

    #[test]
    fn where_a_value_ends_matters() {
        assert_ne!(hash(&("ab", "c")), hash(&("a", "bc")));
        assert_ne!(
            hash(&(vec![1u8], vec![2u8, 3])),
            hash(&(vec![1u8, 2], vec![3u8]))
        );
        assert_ne!(
            hash(&(Some(1u8), None::<u8>)),
            hash(&(None::<u8>, Some(1u8)))
        );
        let shapes = [
            Shape::Unit,
            Shape::One(1),
            Shape::Two(1, 0),
            Shape::Named { a: 1 },
        ];
        let hashes: Vec<_> = shapes.iter().map(hash).collect();
        for (i, a) in hashes.iter().enumerate() {
            assert!(hashes[i + 1..].iter().all(|b| a != b), "{i}");
        }
    }

    #[test]
    fn blocks_do_not_show() {
        let long = vec![0xabu8; 3 * BLOCK + 17];
        let mut bytes = (long.len() as u64).to_le_bytes().to_vec();
        bytes.extend(&long);
        assert_eq!(hash(&long), blake3::hash(&bytes));
        let text = "x".repeat(2 * BLOCK);
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        assert_eq!(hash(&text), blake3::hash(&bytes));
    }
}
