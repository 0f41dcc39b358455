//! Little-endian encoding of the data that processes exchange: fields without padding or tags.

/// Appends fields.
#[derive(Debug, Default)]
pub(crate) struct Writer(pub(crate) Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, x: u8) {
        self.0.push(x);
    }

    pub(crate) fn u32(&mut self, x: u32) {
        self.0.extend(x.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, x: u64) {
        self.0.extend(x.to_le_bytes());
    }

    /// Writes the bits of a float.
    pub(crate) fn f32(&mut self, x: f32) {
        self.u32(x.to_bits());
    }

    /// Writes the bits of a float.
    pub(crate) fn f64(&mut self, x: f64) {
        self.u64(x.to_bits());
    }

    /// Writes bytes, prefixed by their length.
    pub(crate) fn bytes(&mut self, x: &[u8]) {
        self.u64(x.len() as u64);
        self.0.extend_from_slice(x);
    }
}

/// Reads fields. Each method returns `None` if the data end too early.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    pub(crate) fn f32(&mut self) -> Option<f32> {
        self.u32().map(f32::from_bits)
    }

    pub(crate) fn f64(&mut self) -> Option<f64> {
        self.u64().map(f64::from_bits)
    }

    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let n = usize::try_from(self.u64()?).ok()?;
        self.take(n)
    }

    /// Reads a list that is prefixed by its length.
    pub(crate) fn list<T>(
        &mut self,
        mut one: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        let n = self.u32()?;
        (0..n).map(|_| one(self)).collect()
    }

    pub(crate) fn done(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_round_trip_and_truncated_data_are_rejected() {
        let mut w = Writer::default();
        w.u8(7);
        w.u32(8);
        w.u64(9);
        w.f32(f32::NAN);
        w.f64(-0.0);
        w.bytes(b"abc");
        w.u32(2);
        w.u8(1);
        w.u8(2);
        let whole = w.0;
        let read = |bytes: &[u8]| -> Option<Vec<u8>> {
            let mut r = Reader(bytes);
            assert_eq!((r.u8()?, r.u32()?, r.u64()?), (7, 8, 9));
            assert_eq!(r.f32()?.to_bits(), f32::NAN.to_bits());
            assert_eq!(r.f64()?.to_bits(), (-0.0f64).to_bits());
            assert_eq!(r.bytes()?, b"abc");
            let list = r.list(Reader::u8)?;
            r.done().then_some(list)
        };
        assert_eq!(read(&whole), Some(vec![1, 2]));
        for n in 0..whole.len() {
            assert_eq!(read(&whole[..n]), None, "{n}");
        }
    }
}
