//! Memory for weights, caches and what lies between two operations: aligned to cache lines, touched only when used.

use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use bytemuck::Pod;

/// The system refused memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the system refused {bytes} bytes of memory")]
pub struct AllocError {
    /// How much was asked for; `u64::MAX` where the size does not fit 64 bits.
    pub bytes: u64,
}

/// A slice that starts on a page boundary. Its pages are zero and take no room until they are written.
pub struct PageSlice<T> {
    start: NonNull<T>,
    len: usize,
    owner: PhantomData<T>,
}

// SAFETY: a `PageSlice` owns its elements as a `Vec` does.
unsafe impl<T: Send> Send for PageSlice<T> {}
// SAFETY: a shared `PageSlice` gives shared references only.
unsafe impl<T: Sync> Sync for PageSlice<T> {}

impl<T: Pod> PageSlice<T> {
    fn empty() -> Self {
        // Aligned like everything else, so that a view of it as another type is as good as any.
        const NOWHERE: NonZeroUsize = NonZeroUsize::new(SMALL_PAGE).unwrap();
        Self { start: NonNull::without_provenance(NOWHERE), len: 0, owner: PhantomData }
    }

    /// `len` elements whose bytes are all zero.
    ///
    /// # Errors
    /// [`AllocError`] if the system has not that much memory to give, or limits forbid it.
    pub fn zeroed(len: usize) -> Result<Self, AllocError> {
        const { assert!(align_of::<T>() <= SMALL_PAGE, "a page is aligned to 4096 bytes") };
        let Some(bytes) = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok()) else {
            return Err(AllocError { bytes: u64::MAX });
        };
        if bytes == 0 {
            return Ok(Self { len, ..Self::empty() });
        }
        let start = map(bytes)?;
        Ok(Self { start: start.cast(), len, owner: PhantomData })
    }

    /// As [`PageSlice::zeroed`], in pages of 2 MiB, which slices made one after the other share where they meet. Memory is
    /// then taken from the system 2 MiB at a time; where it has no such pages to give, all is as with small ones. What
    /// is given back splits the pages that it shares with neighbours.
    ///
    /// # Errors
    /// As [`PageSlice::zeroed`].
    pub fn zeroed_in_huge_pages(len: usize) -> Result<Self, AllocError> {
        let bytes = len.saturating_mul(size_of::<T>());
        if bytes == 0 || bytes > isize::MAX as usize - 2 * HUGE_PAGE {
            return Self::zeroed(len);
        }
        // A whole region may exceed a limit on the address space that this slice alone does not.
        let start = take_of_region(bytes).or_else(|_| map(bytes))?;
        Ok(Self { start: start.cast(), len, owner: PhantomData })
    }
}

/// The smallest page that systems have.
const SMALL_PAGE: usize = 4096;

const HUGE_PAGE: usize = 2 << 20;

/// Address space that is mapped at once for many slices. Costs nothing until it is written.
const REGION: usize = 256 << 20;

/// What is left of the newest region: its first address and its bytes.
static REGION_LEFT: Mutex<(usize, usize)> = Mutex::new((0, 0));

/// Memory from the newest region, or, if it is much, of its own. Each slice unmaps its part of a region by itself.
fn take_of_region(bytes: usize) -> Result<NonNull<u8>, AllocError> {
    // SAFETY: asks for a constant.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(HUGE_PAGE);
    let bytes = bytes.next_multiple_of(page);
    if bytes > REGION / 4 {
        return map_in_huge_pages(bytes);
    }
    // Another thread may hold the lock, even one that a fork left behind.
    let Ok(mut left) = REGION_LEFT.try_lock() else {
        return if bytes < HUGE_PAGE { map(bytes) } else { map_in_huge_pages(bytes) };
    };
    if left.1 < bytes {
        let region = map_in_huge_pages(REGION)?;
        let (start, rest) = std::mem::replace(&mut *left, (region.as_ptr().expose_provenance(), REGION));
        // SAFETY: it was left of a region, so no slice has it.
        unsafe { unmap(std::ptr::with_exposed_provenance_mut(start), rest) };
    }
    let start = NonNull::new(std::ptr::with_exposed_provenance_mut(left.0));
    *left = (left.0 + bytes, left.1 - bytes);
    start.ok_or(AllocError { bytes: bytes as u64 })
}

/// New memory of whole pages, all zero, that begins with a huge page.
fn map_in_huge_pages(bytes: usize) -> Result<NonNull<u8>, AllocError> {
    // The system puts mappings anywhere: of a larger one, what begins with a huge page is kept.
    let mapped = map(bytes + HUGE_PAGE)?;
    let before = mapped.addr().get().next_multiple_of(HUGE_PAGE) - mapped.addr().get();
    // SAFETY: the pieces lie in the mapping just made, which nobody has seen, and begin with pages; advice about memory
    // does not change what it holds.
    let start = unsafe {
        let start = mapped.add(before);
        unmap(mapped.as_ptr(), before);
        unmap(start.add(bytes).as_ptr(), HUGE_PAGE - before);
        #[cfg(target_os = "linux")]
        libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE);
        start
    };
    Ok(start)
}

/// New memory, all zero.
fn map(bytes: usize) -> Result<NonNull<u8>, AllocError> {
    // SAFETY: asks for new anonymous memory at an address of the kernel's choice; nothing existing is touched.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    NonNull::new(start.cast::<u8>())
        .filter(|start| start.as_ptr().cast() != libc::MAP_FAILED)
        .ok_or(AllocError { bytes: bytes as u64 })
}

/// Gives memory of [`map`] back.
///
/// # Safety
/// `start` is the start of a page of a mapping, and from there on `bytes` belong to the caller; nothing borrows them.
unsafe fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: as the caller promised.
        unsafe { libc::munmap(start.cast(), bytes) };
    }
}

/// Room for what one operation leaves to the next, kept from call to call.
#[derive(Debug)]
pub struct Scratch<T>(PageSlice<T>);

impl<T: Pod> Default for Scratch<T> {
    fn default() -> Self {
        Self(PageSlice::empty())
    }
}

impl<T: Pod> Scratch<T> {
    /// `len` elements that hold anything: write before you read.
    ///
    /// # Panics
    /// If the system refuses the memory.
    pub fn take(&mut self, len: usize) -> &mut [T] {
        if self.0.len < len {
            *self = Self::default();
            // Rows of a tile are far apart: with small pages of the system each would be a walk through its tables.
            let grown = PageSlice::zeroed_in_huge_pages(len.next_power_of_two());
            self.0 = grown.unwrap_or_else(|error| panic!("{error}"));
        }
        &mut self.0[..len]
    }
}

impl<T> Deref for PageSlice<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: constructors mapped room for `len` elements, all zero, which is a value of every Pod type.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for PageSlice<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the mapping is private to this value, which is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for PageSlice<T> {
    fn drop(&mut self) {
        // SAFETY: a slice owns the pages that it begins on, up to its end, and nothing borrows it any more.
        unsafe { unmap(self.start.as_ptr().cast(), self.len * size_of::<T>()) };
    }
}

impl<T> fmt::Debug for PageSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageSlice").field("len", &self.len).finish_non_exhaustive()
    }
}

/// What owns memory that weights lie in.
pub type BytesOwner = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A part of memory that something else owns, such as a mapped file, and keeps as long as this lives.
#[derive(Clone)]
pub struct SharedBytes {
    owner: BytesOwner,
    range: Range<usize>,
}

impl SharedBytes {
    /// A range of what `owner` has; `None` where it does not reach that far.
    #[must_use]
    pub fn new(owner: BytesOwner, range: Range<usize>) -> Option<Self> {
        (*owner).as_ref().get(range.clone())?;
        Some(Self { owner, range })
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBytes").field("range", &self.range).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_and_aligned() {
        let mut slice = PageSlice::<f32>::zeroed(5000).unwrap();
        assert!(slice.iter().all(|x| *x == 0.0));
        assert_eq!(slice.as_ptr().addr() % 4096, 0);
        slice[4999] = 1.0;
        assert_eq!(slice[4999], 1.0);
        assert!(PageSlice::<u8>::zeroed(0).unwrap().is_empty());
    }

    #[test]
    fn slices_in_huge_pages_are_their_own() {
        let lens = [1, 4095, 4096, HUGE_PAGE - 1, HUGE_PAGE, (5 << 20) + 4096, REGION / 4 + 1, REGION / 4, 100];
        for _ in 0..3 {
            let mut slices: Vec<_> =
                lens.iter().map(|len| PageSlice::<u8>::zeroed_in_huge_pages(*len).unwrap()).collect();
            for (number, (slice, len)) in (1..).zip(slices.iter_mut().zip(lens)) {
                assert!(slice.iter().all(|byte| *byte == 0) && slice.len() == len);
                assert_eq!(slice.as_ptr().addr() % SMALL_PAGE, 0);
                slice.fill(number);
            }
            let kept = (1..).zip(slices).filter(|(number, _)| number % 3 > 0).collect::<Vec<(u8, _)>>();
            for (number, slice) in kept {
                assert!(slice.iter().all(|byte| *byte == number));
            }
        }
        assert!(PageSlice::<u64>::zeroed_in_huge_pages(usize::MAX / 4).is_err());
    }

    #[test]
    fn scratch_grows_and_is_kept() {
        let mut scratch = Scratch::<u32>::default();
        assert!(scratch.take(0).is_empty());
        scratch.take(100).fill(7);
        assert_eq!(scratch.take(60), [7; 60]);
        assert_eq!(scratch.take(1 << 20).len(), 1 << 20);
    }

    #[test]
    #[should_panic(expected = "refused")]
    fn too_much_scratch_is_a_panic() {
        Scratch::<u64>::default().take(1 << 59);
    }

    #[test]
    fn too_much_is_an_error() {
        assert_eq!(PageSlice::<f32>::zeroed(usize::MAX / 2).unwrap_err(), AllocError { bytes: u64::MAX });
        let bytes = 1 << 60;
        assert_eq!(PageSlice::<u8>::zeroed(bytes).unwrap_err(), AllocError { bytes: bytes as u64 });
    }
}
